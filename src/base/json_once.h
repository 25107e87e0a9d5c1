// Says that what Json's classes are compiled to is in one file, json_once.cpp, and so in no other. It is precompiled
// before our sources (cmake/Precompiled.cmake), none of which includes it: programs outside have no such file.
#pragma once

#include <nlohmann/json.hpp>

#ifndef GKA_JSON_ONCE
#define GKA_JSON_ONCE extern
#endif

GKA_JSON_ONCE template class nlohmann::basic_json<nlohmann::ordered_map>;
GKA_JSON_ONCE template class nlohmann::detail::serializer<nlohmann::ordered_json>;
GKA_JSON_ONCE template class nlohmann::detail::json_sax_dom_parser<nlohmann::ordered_json>;
GKA_JSON_ONCE template class nlohmann::detail::json_sax_dom_callback_parser<nlohmann::ordered_json>;
// As a std::string_view is parsed.
GKA_JSON_ONCE template class nlohmann::detail::lexer<nlohmann::ordered_json,
                                                     nlohmann::detail::iterator_input_adapter<const char*>>;
GKA_JSON_ONCE template class nlohmann::detail::parser<nlohmann::ordered_json,
                                                      nlohmann::detail::iterator_input_adapter<const char*>>;
