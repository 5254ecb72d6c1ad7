// Files: opening, and what many threads do with one.
#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <thread>
#include <vector>

#include "check.h"
#include "error.h"
#include "unique_fd.h"

using swapper::Access;
using swapper::File;
using swapper::IoError;
using swapper::OpenOptions;
using swapper::UniqueFd;

namespace {

int error_of_open(const std::string& path, const OpenOptions& options) {
    try {
        const File file(path, options);
        return 0;
    } catch (const IoError& error) {
        CHECK(error.operation == "open" && error.path == path);
        return error.code;
    }
}

void opening(const TemporaryDirectory& directory) {
    const std::string path = directory / "file";
    OpenOptions options;
    CHECK(error_of_open(path, options) == ENOENT);
    CHECK(error_of_open(directory / ".", options) == EISDIR);
    options.access = Access::kReadWrite;
    CHECK(error_of_open(directory / ".", options) == EISDIR);
    options.create = true;
    CHECK(error_of_open(path, options) == 0);
    struct stat info{};
    CHECK(::stat(path.c_str(), &info) == 0 && (info.st_mode & 0777) == 0600);
    options.exclusive = true;
    CHECK(error_of_open(path, options) == EEXIST);
    CHECK(error_of_open(directory / "missing/file", options) == ENOENT);

    const File proc("/proc/self/status", OpenOptions{});
    CHECK(!proc.direct() && !proc.direct_refusal().empty() && proc.offset_alignment() == 1);
    const auto cached = open_file(path, false);
    CHECK(!cached->direct() && !cached->direct_refusal().empty() && cached->memory_alignment() == 1);
}

void sizes(const TemporaryDirectory& directory) {
    const auto file = open_file(directory / "sizes");
    CHECK(file->size() == 0);
    CHECK(file->preallocate(0));
    if (file->preallocate(10000)) CHECK(file->size() == 10000);
    file->truncate(5000);
    CHECK(file->size() == 5000);
    file->sync();
    const File readable(directory / "sizes", OpenOptions{});
    CHECK_THROWS(IoError, readable.truncate(1));
    CHECK_THROWS(IoError, readable.preallocate(1));
    OpenOptions options;
    options.access = Access::kWrite;
    options.truncate = true;
    CHECK(File(directory / "sizes", options).size() == 0);
}

void threads_share_a_file(const TemporaryDirectory& directory) {
    const auto file = open_file(directory / "shared");
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&directory, file, thread] {
            for (uint64_t turn = 0; turn < 50; ++turn) {
                file->truncate(thread * 100 + turn);
                file->preallocate(1000);
                CHECK(file->size() < 2000);
                file->sync();
                const auto own = open_file(directory / "shared", turn % 2 == 0);
                CHECK(own->direct() == (turn % 2 == 0 && file->direct()));
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

void descriptors_move() {
    UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int number = first.get();
    UniqueFd second(std::move(first));
    CHECK(second.get() == number && second.valid());
    UniqueFd third;
    third = std::move(second);
    CHECK(third.get() == number);
    third.reset();
    CHECK(!third.valid() && ::fcntl(number, F_GETFD) == -1);
}

void names_change_places(const TemporaryDirectory& directory) {
    const std::string first = directory / "first";
    const std::string second = directory / "second";
    open_file(first)->truncate(1);
    CHECK_THROWS(IoError, swapper::exchange(first, second));
    CHECK(open_file(first)->size() == 1);
    CHECK(::mkdir(second.c_str(), 0700) == 0);
    open_file(second + "/inside")->truncate(2);
    swapper::exchange(first, second);
    CHECK(open_file(second)->size() == 1);
    CHECK(open_file(first + "/inside")->size() == 2);
    CHECK(::unlink((first + "/inside").c_str()) == 0 && ::rmdir(first.c_str()) == 0);
}

}  // namespace

int main() {
    const TemporaryDirectory directory;
    opening(directory);
    sizes(directory);
    threads_share_a_file(directory);
    names_change_places(directory);
    descriptors_move();
    std::puts("file: passed");
    return 0;
}
