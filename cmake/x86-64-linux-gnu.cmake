# Cross compilation with Debian's gcc-x86-64-linux-gnu. Runs under qemu-user where that is installed.
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/linux-gnu.cmake)
