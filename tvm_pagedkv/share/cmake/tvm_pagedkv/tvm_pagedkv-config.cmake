# SPDX-License-Identifier: Apache-2.0
# find_package(tvm_pagedkv CONFIG): the target tvm_pagedkv::tvm_pagedkv, which is the header, the
# library, and what both need of the apache-tvm wheels that the Python interpreter has.
include(CMakeFindDependencyMacro)
find_dependency(Python COMPONENTS Interpreter)

function(_tvm_pagedkv_ask variable)
  execute_process(COMMAND "${Python_EXECUTABLE}" ${ARGN}
    OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${variable} "${answer}" PARENT_SCOPE)
endfunction()

if(NOT TARGET tvm_ffi::shared)
  _tvm_pagedkv_ask(tvm_ffi_ROOT -m tvm_ffi.config --cmakedir)
  find_dependency(tvm_ffi CONFIG)
endif()
# find_spec does not import tvm, which would take seconds.
_tvm_pagedkv_ask(_tvm_pagedkv_tvm -c
  "print(__import__('importlib.util').util.find_spec('tvm').submodule_search_locations[0])")
get_filename_component(_tvm_pagedkv_package "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(_tvm_pagedkv_library "${_tvm_pagedkv_package}/libtvm_pagedkv.so")
if(NOT EXISTS "${_tvm_pagedkv_library}")  # an editable installation
  _tvm_pagedkv_ask(_tvm_pagedkv_library -m tvm_pagedkv.config --library)
endif()

if(NOT TARGET tvm_pagedkv::tvm_pagedkv)
  add_library(tvm_pagedkv::runtime SHARED IMPORTED)
  set_target_properties(tvm_pagedkv::runtime PROPERTIES
    IMPORTED_LOCATION "${_tvm_pagedkv_tvm}/lib/libtvm_runtime.so")
  add_library(tvm_pagedkv::library SHARED IMPORTED)
  set_target_properties(tvm_pagedkv::library PROPERTIES
    IMPORTED_LOCATION "${_tvm_pagedkv_library}"
    INTERFACE_LINK_LIBRARIES tvm_pagedkv::runtime)
  add_library(tvm_pagedkv::tvm_pagedkv INTERFACE IMPORTED)
  # Programs name no symbol of the library: it registers global functions when it is loaded.
  set_target_properties(tvm_pagedkv::tvm_pagedkv PROPERTIES
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_INCLUDE_DIRECTORIES "${_tvm_pagedkv_package}/include"
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"
    INTERFACE_LINK_LIBRARIES "tvm_pagedkv::library;tvm_pagedkv::runtime;tvm_ffi::shared")
endif()
