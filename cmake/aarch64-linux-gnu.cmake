# Cross compilation with Debian's gcc-aarch64-linux-gnu. Runs under qemu-user where that is installed.
set(CMAKE_SYSTEM_PROCESSOR aarch64)
include(${CMAKE_CURRENT_LIST_DIR}/linux-gnu.cmake)
