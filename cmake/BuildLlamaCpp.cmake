# cmake -P script behind LlamaCpp.cmake: builds llama.cpp's static libraries into CACHE_DIR/lib, once.
# Safe when several builds start it at the same time: the first holds the lock, the others wait and find the result.
# In: SOURCE_DIR CACHE_DIR FLAGS LIBRARIES C_COMPILER CXX_COMPILER GENERATOR MAKE_PROGRAM
cmake_minimum_required(VERSION 3.25)

set(stamp "${CACHE_DIR}/complete")
if(EXISTS "${stamp}")
  return()
endif()

file(MAKE_DIRECTORY "${CACHE_DIR}")
file(LOCK "${CACHE_DIR}" DIRECTORY GUARD PROCESS TIMEOUT 7200 RESULT_VARIABLE locked)
if(NOT locked EQUAL 0)
  message(FATAL_ERROR "cannot lock ${CACHE_DIR}: ${locked}. Set PAGEDKV_CACHE_DIR to a folder that can be written.")
endif()
if(EXISTS "${stamp}")
  return()
endif()

set(build_dir "${CACHE_DIR}/build")
set(jobs "$ENV{CMAKE_BUILD_PARALLEL_LEVEL}")
if(NOT jobs)
  execute_process(COMMAND nproc OUTPUT_VARIABLE jobs OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()

# One build at a time and its own folder, so a broken attempt leaves nothing that the next one would trust.
file(REMOVE_RECURSE "${build_dir}" "${CACHE_DIR}/lib")
message(STATUS "building llama.cpp's libraries with ${jobs} jobs into ${CACHE_DIR}")
execute_process(
  COMMAND "${CMAKE_COMMAND}" -S "${SOURCE_DIR}" -B "${build_dir}" -G "${GENERATOR}" ${FLAGS}
          "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_C_COMPILER=${C_COMPILER}"
          "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DLLAMA_BUILD_COMMIT=pagedkv -DLLAMA_BUILD_NUMBER=0
  OUTPUT_FILE "${CACHE_DIR}/configure.log" ERROR_FILE "${CACHE_DIR}/configure.log" RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "llama.cpp does not configure; see ${CACHE_DIR}/configure.log")
endif()
execute_process(
  COMMAND "${CMAKE_COMMAND}" --build "${build_dir}" --parallel ${jobs} --target ggml-cpu ggml llama llama-common
  RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "llama.cpp does not build; its sources are ${SOURCE_DIR}")
endif()

foreach(library IN LISTS LIBRARIES)
  file(GLOB_RECURSE archive "${build_dir}/lib${library}.a")
  if(NOT archive)
    message(FATAL_ERROR "llama.cpp's build made no lib${library}.a")
  endif()
  file(COPY ${archive} DESTINATION "${CACHE_DIR}/lib")
endforeach()
file(REMOVE_RECURSE "${build_dir}")
file(TOUCH "${stamp}")
