// Files: read and written whole, or refused with a sentence.
#include "base/files.h"

#include <gtest/gtest.h>

#include <fstream>

#include "models/scratch.h"

namespace gka {
namespace {

using models::test::Scratch;

TEST(Files, ThatAreFifosAreRefusedWithoutWaiting) {
  const Scratch scratch;
  ASSERT_EQ(::mkfifo((scratch / "pipe").c_str(), 0666), 0);
  EXPECT_ERROR(read_text(scratch / "pipe"), "pipe: it is not a file");
  EXPECT_ERROR(MappedFile(scratch / "pipe"), "pipe: it is not a file");
  EXPECT_ERROR(read_text(scratch.path()), "it is not a file");
}

TEST(Files, LeftByAKilledWriterGoWithTheNextOne) {
  const Scratch scratch;
  std::ofstream(scratch / "a.writing-1") << "half";
  write_text(scratch / "a", "whole");
  EXPECT_EQ(scratch.names(), std::vector<std::string>{"a"});
}

TEST(Files, ThatAnotherProcessWritesStay) {
  const Scratch scratch;
  std::ofstream(scratch / "a.writing-1") << "half";
  const Descriptor other(::open((scratch / "a.writing-1").c_str(), O_RDONLY));
  ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
  write_text(scratch / "a", "whole");
  EXPECT_EQ(scratch.names(), (std::vector<std::string>{"a", "a.writing-1"}));
}

TEST(Files, LearnAtTheirEndWhatBelongsAtTheirStart) {
  const Scratch scratch;
  NewFile file(scratch / "a");
  file.write("....five");
  file.write_at(0, "four", 4);
  file.write("six");
  file.commit();
  EXPECT_EQ(read_text(scratch / "a"), "fourfivesix");
}

TEST(FilesDeathTest, ThatShrinkWhileMappedEndInASentence) {
  const Scratch scratch;
  write_text(scratch / "a", std::string(100000, 'x'));
  const auto read = [&] {
    explain_lost_pages();
    const MappedFile file(scratch / "a");
    std::filesystem::resize_file(scratch / "a", 10);
    std::size_t sum = 0;
    for (const char byte : file.text()) sum += static_cast<unsigned char>(byte);
    std::fprintf(stderr, "%zu", sum);
  };
  EXPECT_EXIT(read(), testing::ExitedWithCode(1), "a became shorter");
}

}  // namespace
}  // namespace gka
