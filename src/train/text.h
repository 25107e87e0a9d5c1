// Numbers as people read them: 12.3k, 1.2 GB, 4m12s.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

namespace gka::train {

/// printf into a string; for numbers, so it is short.
template <typename... Values>
std::string print(const char* format, Values... values) {
  std::array<char, 128> text;
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

/// 950, 12.3k, 4.56M, 7.89B: three digits.
inline std::string short_count(double value) {
  constexpr std::array kUnits{"", "k", "M", "B", "T"};
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) value /= 1000, ++unit;
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return print("%.*f%s", decimals, value, kUnits[unit]);
}

inline std::string short_bytes(double bytes) {
  const auto gigabytes = bytes / 1e9;
  return gigabytes < 1 ? print("%.0f MB", bytes / 1e6) : print("%.1f GB", gigabytes);
}

inline std::string short_duration(double seconds) {
  const auto whole = static_cast<long long>(std::llround(std::max(0.0, seconds)));
  if (whole < 60) return print("%llds", whole);
  if (whole < 3600) return print("%lldm%02llds", whole / 60, whole % 60);
  if (whole < 86400) return print("%lldh%02lldm", whole / 3600, whole / 60 % 60);
  return print("%lldd%02lldh", whole / 86400, whole / 3600 % 24);
}

}  // namespace gka::train
