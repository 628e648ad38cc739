# RA_PYTHON: an interpreter that can import numpy, for the tests that are written in Python; empty if there is none.
# A developer's own python3 often comes first in PATH and lacks numpy, so each candidate is asked.
set(RA_PYTHON "" CACHE FILEPATH "Python 3 with numpy, for tests")
set(RA_PYTHON_STATUS "no (no python3 with numpy)")
find_program(path_python3 python3)
mark_as_advanced(path_python3)
foreach(candidate IN ITEMS "${RA_PYTHON}" "$ENV{RA_PYTHON}" "${path_python3}" /usr/bin/python3
        "${PROJECT_SOURCE_DIR}/build/venv/bin/python3")
    if(NOT candidate)
        continue()
    endif()
    execute_process(COMMAND ${candidate} -c "import sys, numpy; print(sys.version.split()[0], 'numpy', numpy.__version__)"
        OUTPUT_VARIABLE answer ERROR_QUIET RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT failed)
        set(RA_PYTHON "${candidate}" CACHE FILEPATH "Python 3 with numpy, for tests" FORCE)
        set(RA_PYTHON_STATUS "${candidate} (${answer})")
        break()
    endif()
    if(candidate STREQUAL RA_PYTHON)
        set(RA_PYTHON "" CACHE FILEPATH "Python 3 with numpy, for tests" FORCE)
    endif()
endforeach()
