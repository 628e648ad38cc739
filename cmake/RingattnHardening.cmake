# ringattn_hardening: what hardened distributions compile and link with, for all that is installed. A mistake that an attacker could
# use ends the process instead. Flags that a compiler or linker does not know are left out; tests/install_objects.py reads from the
# objects what took effect.
option(RA_HARDENING "Stack protector, checked C library calls, read-only relocations, protected branches" ON)
add_library(ringattn_hardening INTERFACE)
if(NOT RA_HARDENING)
    return()
endif()

include(CheckCCompilerFlag)
include(CheckCSourceCompiles)
include(CheckLinkerFlag)
include(CheckPIESupported)
check_pie_supported(LANGUAGES C) # executables are linked with -pie: POSITION_INDEPENDENT_CODE alone only compiles for it

set(flags -fstack-protector-strong)
if(ra_x86)
    list(APPEND flags -fcf-protection)
elseif(ra_arm)
    list(APPEND flags -mbranch-protection=standard)
endif()
foreach(flag IN LISTS flags)
    string(MAKE_C_IDENTIFIER "RA_HAS${flag}" known)
    check_c_compiler_flag(${flag} ${known})
    if(${known})
        target_compile_options(ringattn_hardening INTERFACE
            $<$<COMPILE_LANGUAGE:C>:${flag}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flag}>)
    endif()
endforeach()

# The C library checks its calls only in optimised code, and warns of a level that it does not know. Sanitizers check the same calls
# themselves.
foreach(level 3 2)
    set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=${level}")
    check_c_source_compiles("#include <string.h>\nint main(void) { return 0; }" RA_HAS_FORTIFY_${level})
    unset(CMAKE_REQUIRED_FLAGS)
    if(RA_HAS_FORTIFY_${level} AND NOT RA_SANITIZE)
        set(optimised $<NOT:$<CONFIG:Debug>>)
        target_compile_options(ringattn_hardening INTERFACE
            "$<$<AND:$<COMPILE_LANGUAGE:C>,${optimised}>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${level}>"
            "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,${optimised}>:-Xcompiler=-U_FORTIFY_SOURCE;-Xcompiler=-D_FORTIFY_SOURCE=${level}>")
        break()
    endif()
endforeach()

# Every symbol is bound at the start and the tables are read-only from then on; nothing on the stack is code.
foreach(word relro now noexecstack)
    check_linker_flag(C LINKER:-z,${word} RA_HAS_LINKER_${word})
    if(RA_HAS_LINKER_${word})
        target_link_options(ringattn_hardening INTERFACE LINKER:-z,${word})
    endif()
endforeach()
