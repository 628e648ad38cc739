# Cross compilation with Debian's gcc-x86-64-linux-gnu. Runs under qemu-user where that is installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
find_program(RA_QEMU NAMES qemu-x86_64 qemu-x86_64-static)
if(RA_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR ${RA_QEMU} -cpu max -L /usr/x86_64-linux-gnu)
endif()
