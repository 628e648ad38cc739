# What `cmake --install` lays out: header, shared and static library, command line, pkg-config file and CMake package.
include(CMakePackageConfigHelpers)

install(TARGETS ringattn ringattn_static EXPORT ringattn
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
file(GLOB public_headers CONFIGURE_DEPENDS include/*.h)
install(FILES ${public_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET ringattn_cli)
    install(TARGETS ringattn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
    if(NOT CMAKE_CROSSCOMPILING) # the program itself makes these, from its option table
        set(share ${PROJECT_BINARY_DIR}/share)
        file(MAKE_DIRECTORY ${share})
        add_custom_command(OUTPUT ${share}/ringattn.1 ${share}/ringattn ${share}/_ringattn
            COMMAND ringattn_cli man > ${share}/ringattn.1
            COMMAND ringattn_cli completion bash > ${share}/ringattn
            COMMAND ringattn_cli completion zsh > ${share}/_ringattn
            DEPENDS ringattn_cli)
        add_custom_target(ringattn_share ALL DEPENDS ${share}/ringattn.1 ${share}/ringattn ${share}/_ringattn)
        install(FILES ${share}/ringattn.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
        install(FILES ${share}/ringattn DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
        install(FILES ${share}/_ringattn DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    endif()
endif()
install(FILES docs/ringattn.3 DESTINATION ${CMAKE_INSTALL_MANDIR}/man3)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ringattn)
install(EXPORT ringattn NAMESPACE ringattn:: FILE ringattnTargets.cmake DESTINATION ${package_dir})
configure_package_config_file(cmake/ringattnConfig.cmake.in ringattnConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(ringattnConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ringattnConfig.cmake ${PROJECT_BINARY_DIR}/ringattnConfigVersion.cmake
    DESTINATION ${package_dir})

# The prefix is known only at install time (cmake --install --prefix), so the file finds it from its own place.
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(cmake/ringattn.pc.in ringattn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ringattn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# A Python wheel (pyproject.toml) holds the shared library and the command line beside the package's files; wheels know no symbolic
# links.
if(SKBUILD)
    add_custom_target(wheel DEPENDS ringattn $<TARGET_NAME_IF_EXISTS:ringattn_cli>)
    install(FILES $<TARGET_FILE:ringattn> DESTINATION ringattn COMPONENT python RENAME libringattn.so)
    if(TARGET ringattn_cli)
        install(PROGRAMS $<TARGET_FILE:ringattn_cli> DESTINATION ringattn COMPONENT python)
    endif()
    if(TARGET ringattn_cuda)
        add_dependencies(wheel ringattn_cuda)
        install(FILES $<TARGET_FILE:ringattn_cuda> DESTINATION ringattn COMPONENT python)
    endif()
endif()
