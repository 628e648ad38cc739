# What the toolchain files here share: Debian's cross compiler for CMAKE_SYSTEM_PROCESSOR, and qemu-user to run its programs.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_C_COMPILER ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu-gcc)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
find_program(RA_QEMU NAMES qemu-${CMAKE_SYSTEM_PROCESSOR} qemu-${CMAKE_SYSTEM_PROCESSOR}-static)
if(RA_QEMU)
    set(CMAKE_CROSSCOMPILING_EMULATOR ${RA_QEMU} -cpu max -L /usr/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
endif()
# Only libraries of that processor: a multiarch directory, or the tree that RA_SYSROOT names.
set(ENV{PKG_CONFIG_LIBDIR} "$ENV{RA_SYSROOT}/usr/lib/${CMAKE_SYSTEM_PROCESSOR}-linux-gnu/pkgconfig")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "$ENV{RA_SYSROOT}")
