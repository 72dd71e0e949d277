# Gives the INTERFACE target `llama_cpp`: headers and static libraries of llama.cpp (ggml, libllama, llama-common).
#
# Sources: PAGEDKV_LLAMA_SOURCE_DIR (variable or environment), else what scripts/setup.sh fetched into the cache folder.
# Libraries: <cache>/llama.cpp/<key>/lib, built by BuildLlamaCpp.cmake during the first build that needs them. The key
# covers sources, flags, compiler and CPU features, so build trees, presets and CI share one copy and a change of any
# makes a new one. Sanitizer presets link the same uninstrumented libraries.

include("${CMAKE_CURRENT_LIST_DIR}/LlamaFlags.cmake")
# In link order: a library stands before those whose symbols it uses.
set(PAGEDKV_LLAMA_LIBRARIES llama-common llama-common-base cpp-httplib llama ggml ggml-cpu ggml-base)

# Where things are kept that are downloaded or built once; scripts/cache_dir.sh states the rule.
function(pagedkv_cache_dir out)
  if(DEFINED PAGEDKV_CACHE_DIR)
    get_filename_component(dir "${PAGEDKV_CACHE_DIR}" ABSOLUTE BASE_DIR "${CMAKE_BINARY_DIR}")
  else()
    execute_process(COMMAND "${PROJECT_SOURCE_DIR}/scripts/cache_dir.sh"
      OUTPUT_VARIABLE dir OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(${out} "${dir}" PARENT_SCOPE)
endfunction()

function(pagedkv_llama_source_dir cache_dir out)
  set(fetched "${cache_dir}/sources/llama_cpp_python-${PAGEDKV_LLAMA_VERSION}/vendor/llama.cpp")
  if(PAGEDKV_LLAMA_SOURCE_DIR)
    set(dir "${PAGEDKV_LLAMA_SOURCE_DIR}")
  elseif(DEFINED ENV{PAGEDKV_LLAMA_SOURCE_DIR})
    set(dir "$ENV{PAGEDKV_LLAMA_SOURCE_DIR}")
  else()
    set(dir "${fetched}")
  endif()
  get_filename_component(dir "${dir}" ABSOLUTE BASE_DIR "${PROJECT_SOURCE_DIR}")
  if(NOT EXISTS "${dir}/ggml/include/ggml.h" OR NOT EXISTS "${dir}/include/llama.h")
    message(FATAL_ERROR "llama.cpp's sources are not in ${dir}. Run scripts/setup.sh to fetch them, or set "
      "PAGEDKV_LLAMA_SOURCE_DIR to a checkout, or leave the engine out with -DPAGEDKV_BUILD_ENGINE=OFF.")
  endif()
  set(${out} "${dir}" PARENT_SCOPE)
endfunction()

# What names the sources: the pinned version, or for a user's checkout a hash of the files that are built.
function(pagedkv_llama_source_id source_dir cache_dir out)
  if(source_dir STREQUAL "${cache_dir}/sources/llama_cpp_python-${PAGEDKV_LLAMA_VERSION}/vendor/llama.cpp")
    set(id "${PAGEDKV_LLAMA_VERSION}")
  else()
    execute_process(WORKING_DIRECTORY "${source_dir}"
      COMMAND find CMakeLists.txt cmake ggml src common include vendor -type f -print0
      COMMAND sort -z COMMAND xargs -0 sha256sum COMMAND sha256sum
      OUTPUT_VARIABLE files_hash COMMAND_ERROR_IS_FATAL ANY)
    string(SUBSTRING "${files_hash}" 0 12 files_hash)
    set(id "checkout-${files_hash}")
  endif()
  set(${out} "${id}" PARENT_SCOPE)
endfunction()

# What -march=native means here: a library built for another CPU's features must not be picked up.
function(pagedkv_native_features out)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -march=native -Q --help=target
    OUTPUT_VARIABLE features ERROR_QUIET RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -march=native -x c++ -dM -E /dev/null
      OUTPUT_VARIABLE features COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(${out} "${features}" PARENT_SCOPE)
endfunction()

pagedkv_cache_dir(_pagedkv_cache)
pagedkv_llama_source_dir("${_pagedkv_cache}" _llama_source)
pagedkv_llama_source_id("${_llama_source}" "${_pagedkv_cache}" _llama_id)
pagedkv_native_features(_llama_features)
string(SHA256 _llama_hash
  "${_llama_id};${PAGEDKV_LLAMA_FLAGS};${CMAKE_CXX_COMPILER_ID};${CMAKE_CXX_COMPILER_VERSION};${_llama_features}")
string(SUBSTRING "${_llama_hash}" 0 12 _llama_hash)
set(PAGEDKV_LLAMA_BUILD_ID "${_llama_id}-${_llama_hash}")
set(_llama_dir "${_pagedkv_cache}/llama.cpp/${PAGEDKV_LLAMA_BUILD_ID}")
message(STATUS "llama.cpp: sources ${_llama_source}, libraries ${_llama_dir}")

list(TRANSFORM PAGEDKV_LLAMA_LIBRARIES PREPEND "${_llama_dir}/lib/lib" OUTPUT_VARIABLE _llama_archives)
list(TRANSFORM _llama_archives APPEND ".a")

set(_llama_stamp "${CMAKE_BINARY_DIR}/llama_cpp.stamp")
add_custom_command(OUTPUT "${_llama_stamp}" BYPRODUCTS ${_llama_archives}
  COMMAND "${CMAKE_COMMAND}" "-DSOURCE_DIR=${_llama_source}" "-DCACHE_DIR=${_llama_dir}"
          "-DFLAGS=${PAGEDKV_LLAMA_FLAGS}" "-DLIBRARIES=${PAGEDKV_LLAMA_LIBRARIES}"
          "-DC_COMPILER=${CMAKE_C_COMPILER}" "-DCXX_COMPILER=${CMAKE_CXX_COMPILER}"
          "-DGENERATOR=${CMAKE_GENERATOR}" "-DMAKE_PROGRAM=${CMAKE_MAKE_PROGRAM}"
          -P "${CMAKE_CURRENT_LIST_DIR}/BuildLlamaCpp.cmake"
  COMMAND "${CMAKE_COMMAND}" -E touch "${_llama_stamp}"
  COMMENT "llama.cpp's libraries (built once, some minutes)" USES_TERMINAL VERBATIM)
add_custom_target(llama_cpp_libraries DEPENDS "${_llama_stamp}")

add_library(llama_cpp INTERFACE)
target_include_directories(llama_cpp SYSTEM INTERFACE
  "${_llama_source}/ggml/include" "${_llama_source}/include" "${_llama_source}/common" "${_llama_source}/vendor")
target_link_libraries(llama_cpp INTERFACE ${_llama_archives} Threads::Threads ${CMAKE_DL_LIBS})
# Part of the arithmetic id of stored pages: sources, flags, compiler and CPU features of ggml in one word.
target_compile_definitions(llama_cpp INTERFACE "PAGEDKV_LLAMA_BUILD_ID=\"${PAGEDKV_LLAMA_BUILD_ID}\"")
if(NOT CMAKE_GENERATOR MATCHES "Ninja")
  # Ninja sees from the file names that linking, and only linking, must wait for the archives.
  add_dependencies(llama_cpp llama_cpp_libraries)
endif()
