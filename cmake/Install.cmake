# The installed library: base, kernels and core as one, static and shared from the same objects. Only what the public
# headers declare is visible.
#   find_package(pagedkv)  -> pagedkv::pagedkv, which is pagedkv::shared or pagedkv::static by BUILD_SHARED_LIBS
#   pkg-config pagedkv
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

get_property(library_objects GLOBAL PROPERTY pagedkv_attention_objects)
foreach(layer base kernels core)
  list(APPEND library_objects $<TARGET_OBJECTS:pagedkv_${layer}>)
endforeach()
set(library_targets)
foreach(kind static shared)
  string(TOUPPER ${kind} type)
  add_library(pagedkv_${kind} ${type} ${library_objects})
  set_target_properties(pagedkv_${kind} PROPERTIES OUTPUT_NAME pagedkv EXPORT_NAME ${kind} LINKER_LANGUAGE CXX
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  target_compile_features(pagedkv_${kind} INTERFACE cxx_std_20)
  target_include_directories(pagedkv_${kind} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(pagedkv_${kind} PRIVATE Threads::Threads OpenSSL::Crypto)
  if(HWY_LIBRARY)
    target_link_libraries(pagedkv_${kind} PRIVATE $<BUILD_INTERFACE:${HWY_LIBRARY}> $<INSTALL_INTERFACE:hwy>)
  endif()
  list(APPEND library_targets pagedkv_${kind})
endforeach()

target_link_options(pagedkv_shared PRIVATE -Wl,--no-undefined)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pagedkv)
install(TARGETS ${library_targets} EXPORT pagedkv COMPONENT library)
install(EXPORT pagedkv NAMESPACE pagedkv:: FILE pagedkv-targets.cmake DESTINATION ${package_dir} COMPONENT library)
install(DIRECTORY include/pagedkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library FILES_MATCHING PATTERN *.h)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
configure_package_config_file(cmake/pagedkv-config.cmake.in ${PROJECT_BINARY_DIR}/pagedkv-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/pagedkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/pagedkv-config.cmake ${PROJECT_BINARY_DIR}/pagedkv-config-version.cmake
  DESTINATION ${package_dir} COMPONENT library)
# Paths in it follow the file itself, so that an installed tree may be moved.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_prefix ${pc_prefix})
set(pc_private)
if(HWY_LIBRARY)
  set(pc_private -lhwy)
endif()
configure_file(cmake/pagedkv.pc.in ${PROJECT_BINARY_DIR}/pagedkv.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pagedkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
