# Cross compilation with Debian's gcc-x86-64-linux-gnu. Runs under qemu-user where that is installed.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
find_program(RA_QEMU NAMES qemu-x86_64 qemu-x86_64-static)
if(RA_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR ${RA_QEMU} -cpu max -L /usr/x86_64-linux-gnu)
endif()
# Only libraries of that processor: a multiarch directory, or the tree that RA_SYSROOT names.
set(ENV{PKG_CONFIG_LIBDIR} "$ENV{RA_SYSROOT}/usr/lib/x86_64-linux-gnu/pkgconfig")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "$ENV{RA_SYSROOT}")
