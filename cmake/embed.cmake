# SPDX-License-Identifier: Apache-2.0
# cmake -D INPUT=... -D OUTPUT=... -D NAME=... -P embed.cmake: writes a .cc that defines `extern const std::string_view NAME`.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
file(WRITE ${OUTPUT} "#include <string_view>\nnamespace lode {\nextern const std::string_view ${NAME};\nstatic const unsigned char bytes[] = {${bytes}0};\nconst std::string_view ${NAME}(reinterpret_cast<const char*>(bytes), sizeof bytes - 1);\n}\n")
