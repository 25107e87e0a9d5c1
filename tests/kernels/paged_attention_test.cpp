// Attention over pages: the kernel's own source on the host, with all its threads, against sums in float64.
#define cuda cuda_with_threads
#include "kernels/cuda/attention/paged.cu"
#include "kernels/cuda/attention/paged_int8.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace gka::kernels::test {
namespace {

using cuda_with_threads::PagedAttention;
using Halves = std::vector<std::uint16_t>;

struct Case {
  std::int64_t heads, kv_heads, head_dim, splits;
  std::vector<std::int64_t> positions;
};

const Case kCases[]{
    {.heads = 4, .kv_heads = 1, .head_dim = 128, .splits = 1, .positions = {0, 63, 64, 150}},
    {.heads = 4, .kv_heads = 1, .head_dim = 128, .splits = 3, .positions = {300, 5}},  // splits that see nothing
    {.heads = 2, .kv_heads = 2, .head_dim = 64, .splits = 2, .positions = {130}},
    {.heads = 16, .kv_heads = 2, .head_dim = 64, .splits = 1, .positions = {70}},  // two blocks for a key head
    {.heads = 2, .kv_heads = 1, .head_dim = 256, .splits = 2, .positions = {65, 127}},
};

double number(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

Halves random_halves(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Halves halves(static_cast<std::size_t>(count));
  for (auto& half : halves) half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
  return halves;
}

std::vector<std::int64_t> pages_in_any_order(std::int64_t count) {
  std::vector<std::int64_t> pages(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<std::int64_t>(pages.size() - i);
  return pages;
}

float own_scale(const Case& c) { return 1 / std::sqrt(static_cast<float>(c.head_dim)); }

/// o of a call that has what the case does not say.
Halves attend(const Case& c, PagedAttention call) {
  std::vector<std::unique_ptr<char[]>> scratch;
  cuda_with_threads::Device device;
  device.allocate = [&](std::size_t bytes) {
    scratch.push_back(std::make_unique<char[]>(bytes));
    return scratch.back().get();
  };
  call.batch = std::ssize(c.positions);
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.head_dim = c.head_dim;
  call.splits = c.splits;
  call.scale = own_scale(c);
  call.positions = c.positions.data();
  Halves o(static_cast<std::size_t>(call.batch * c.heads * c.head_dim));
  call.o = o.data();
  cuda_with_threads::paged_attention(call, device);
  return o;
}

TEST(PagedAttention, IsTheSoftmaxOverEveryTokenAndWritesTheNewOne) {
  constexpr auto kPage = PagedAttention::kPage;
  for (const auto& c : kCases) {
    std::mt19937 random(7);
    const auto batch = std::ssize(c.positions), width = *std::ranges::max_element(c.positions) / kPage + 1;
    const auto token = c.kv_heads * c.head_dim, all = (batch * width + 1) * kPage * token;
    const auto q = random_halves(batch * c.heads * c.head_dim, random), k = random_halves(batch * token, random),
               v = random_halves(batch * token, random);
    auto keys = random_halves(all, random), values = random_halves(all, random);
    const auto pages = pages_in_any_order(batch * width);
    const float scale = own_scale(c);
    const auto o = attend(c, {.width = width,
                              .q = q.data(),
                              .k = k.data(),
                              .v = v.data(),
                              .keys = keys.data(),
                              .values = values.data(),
                              .pages = pages.data()});
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto position = c.positions[static_cast<std::size_t>(b)];
      const auto place = [&](std::int64_t t, std::int64_t kv) {
        const auto page = pages[static_cast<std::size_t>(b * width + t / kPage)];
        return static_cast<std::size_t>((page * kPage + t % kPage) * token + kv * c.head_dim);
      };
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto kv = h / (c.heads / c.kv_heads);
        for (std::int64_t d = 0; d < c.head_dim; ++d) {
          const auto own = static_cast<std::size_t>((b * c.kv_heads + kv) * c.head_dim + d);
          ASSERT_EQ(keys[place(position, kv) + static_cast<std::size_t>(d)], k[own]);
          ASSERT_EQ(values[place(position, kv) + static_cast<std::size_t>(d)], v[own]);
        }
        std::vector<double> answer(static_cast<std::size_t>(c.head_dim), 0.0);
        double sum = 0;
        for (std::int64_t t = 0; t <= position; ++t) {
          double score = 0;
          for (std::int64_t d = 0; d < c.head_dim; ++d) {
            score += number(q[static_cast<std::size_t>((b * c.heads + h) * c.head_dim + d)]) *
                     number(keys[place(t, kv) + static_cast<std::size_t>(d)]);
          }
          const double weight = std::exp(score * scale);
          sum += weight;
          for (std::size_t d = 0; d < answer.size(); ++d) answer[d] += weight * number(values[place(t, kv) + d]);
        }
        for (std::size_t d = 0; d < answer.size(); ++d) {
          const auto got = number(o[static_cast<std::size_t>((b * c.heads + h) * c.head_dim) + d]);
          EXPECT_NEAR(got, answer[d] / sum, 4e-3 * std::abs(answer[d] / sum) + 1e-5) << b << " " << h << " " << d;
        }
      }
    }
  }
}

/// A page of bytes: numbers of a head, and where its scales begin.
std::size_t head_in(std::int64_t page, std::int64_t head, const Case& c) {
  return static_cast<std::size_t>((page * c.kv_heads + head) * int8_page_head_bytes(c.head_dim));
}

std::vector<char> random_bytes(std::int64_t pages, const Case& c, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<char> bytes(head_in(pages, 0, c));
  for (auto& byte : bytes) byte = static_cast<char>(static_cast<int>(random() % 255) - 127);
  for (std::int64_t page = 0; page < pages; ++page) {
    for (std::int64_t head = 0; head < c.kv_heads; ++head) {
      for (std::int64_t token = 0; token < kInt8PageTokens; ++token) {
        const float scale = 0.02f * std::exp(normal(random));  // of other sizes from token to token
        const auto at = static_cast<std::size_t>(kInt8PageTokens * c.head_dim + kInt8ScaleBytes * token);
        std::memcpy(bytes.data() + head_in(page, head, c) + at, &scale, sizeof scale);
      }
    }
  }
  return bytes;
}

TEST(PagedAttention, OverBytesIsTheSoftmaxOverWhatTheyStandForAndRoundsTheNewToken) {
  constexpr auto kPage = PagedAttention::kPage;
  for (const auto& c : kCases) {
    std::mt19937 random(8);
    const auto batch = std::ssize(c.positions), width = *std::ranges::max_element(c.positions) / kPage + 1;
    const auto q = random_halves(batch * c.heads * c.head_dim, random);
    auto k = random_halves(batch * c.kv_heads * c.head_dim, random);
    const auto v = random_halves(batch * c.kv_heads * c.head_dim, random);
    std::fill_n(k.begin(), c.head_dim, std::uint16_t{0});  // a key of nothing
    auto keys = random_bytes(batch * width + 1, c, random), values = random_bytes(batch * width + 1, c, random);
    const auto pages = pages_in_any_order(batch * width);
    const float scale = own_scale(c);
    const auto o = attend(c, {.width = width,
                              .int8 = true,
                              .q = q.data(),
                              .k = k.data(),
                              .v = v.data(),
                              .keys = keys.data(),
                              .values = values.data(),
                              .pages = pages.data()});
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto position = c.positions[static_cast<std::size_t>(b)];
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto kv = h / (c.heads / c.kv_heads);
        const auto scale_of = [&](const std::vector<char>& pool, std::int64_t t) {
          const auto head = head_in(pages[static_cast<std::size_t>(b * width + t / kPage)], kv, c);
          float of = 0;
          std::memcpy(&of, pool.data() + head + static_cast<std::size_t>(kPage * c.head_dim + 4 * (t % kPage)), 4);
          return static_cast<double>(of);
        };
        const auto of = [&](const std::vector<char>& pool, std::int64_t t, std::int64_t d) {
          const auto head = head_in(pages[static_cast<std::size_t>(b * width + t / kPage)], kv, c);
          const auto byte = pool[head + static_cast<std::size_t>(t % kPage * c.head_dim + d)];
          return static_cast<double>(static_cast<signed char>(byte)) * scale_of(pool, t);
        };
        const auto own = static_cast<std::size_t>((b * c.kv_heads + kv) * c.head_dim);
        for (std::int64_t d = 0; d < c.head_dim; ++d) {  // within half a step
          const auto at = own + static_cast<std::size_t>(d);
          ASSERT_NEAR(of(keys, position, d), number(k[at]), 0.501 * scale_of(keys, position)) << b << " " << h;
          ASSERT_NEAR(of(values, position, d), number(v[at]), 0.501 * scale_of(values, position)) << b << " " << h;
        }
        std::vector<double> answer(static_cast<std::size_t>(c.head_dim), 0.0);
        double sum = 0;
        for (std::int64_t t = 0; t <= position; ++t) {
          double score = 0;
          for (std::int64_t d = 0; d < c.head_dim; ++d) {
            score += number(q[static_cast<std::size_t>((b * c.heads + h) * c.head_dim + d)]) * of(keys, t, d);
          }
          const double weight = std::exp(score * scale);
          sum += weight;
          for (std::size_t d = 0; d < answer.size(); ++d) {
            answer[d] += weight * of(values, t, static_cast<std::int64_t>(d));
          }
        }
        for (std::size_t d = 0; d < answer.size(); ++d) {
          const auto got = number(o[static_cast<std::size_t>((b * c.heads + h) * c.head_dim) + d]);
          EXPECT_NEAR(got, answer[d] / sum, 4e-3 * std::abs(answer[d] / sum) + 2e-5) << b << " " << h << " " << d;
        }
      }
    }
  }
}

TEST(PagedAttention, HeadsOf256AreTooLargeForCardsWithLittleSharedMemory) {
  constexpr std::int64_t kSmallCard = 99 * 1024, kA100 = 163 * 1024;  // of a block
  for (const std::int64_t dim : {64, 128}) EXPECT_LE(cuda_with_threads::paged_shared_bytes(dim), kSmallCard);
  EXPECT_GT(cuda_with_threads::paged_shared_bytes(256), kSmallCard);
  EXPECT_LE(cuda_with_threads::paged_shared_bytes(256), kA100);
  EXPECT_TRUE(cuda_with_threads::has_room_for_pages(256, 0));
}

TEST(PagedAttention, SplitsFillACardAndNeverFewerThanOne) {
  using cuda_with_threads::paged_splits;
  // Three blocks to a multiprocessor of 132: a round of 396. Rounds are full, or nearly.
  for (const std::int64_t batch : {1, 2, 8, 16, 31, 64, 128, 256}) {
    const auto blocks = batch * 8 * paged_splits({.batch = batch, .heads = 32, .kv_heads = 8, .width = 2048});
    EXPECT_GE(static_cast<double>(blocks), 0.95 * static_cast<double>((blocks + 395) / 396 * 396)) << batch;
  }
  EXPECT_EQ(paged_splits({.batch = 1, .heads = 32, .kv_heads = 8, .width = 1}), 1);
  EXPECT_EQ(paged_splits({.batch = 1, .heads = 32, .kv_heads = 8, .width = 40}), 10);
}

}  // namespace
}  // namespace gka::kernels::test
