// Files that are closed while they are not used, and opened again by their names.
#include "open_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "check.h"
#include "engine.h"
#include "error.h"
#include "file.h"

using swapper::Access;
using swapper::BackendKind;
using swapper::Descriptors;
using swapper::Engine;
using swapper::EngineOptions;
using swapper::File;
using swapper::IoError;
using swapper::OpenFiles;
using swapper::OpenOptions;
using swapper::Operation;
using swapper::Transfer;
using swapper::UniqueFd;

namespace {

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kLength = 4 * kBlock;

std::shared_ptr<File> open_by_name(const std::string& path, bool direct = true,
                                   Access access = Access::kReadWrite) {
    OpenOptions options;
    options.access = access;
    options.create = access != Access::kRead;
    options.direct = direct;
    options.by_name = true;
    return std::make_shared<File>(path, options);
}

size_t open_now() {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        (void)entry;
        ++count;
    }
    return count;
}

void limit_descriptors(rlim_t most) {
    rlimit limit{};
    CHECK(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = most;
    CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

bool is_open(const File& file) {
    return file.opened() != nullptr;
}

void close_all() {
    while (OpenFiles::get().close_one()) {
    }
}

uint64_t size_of(const std::shared_ptr<File>& file) {
    const std::shared_ptr<const Descriptors> descriptors = file->descriptors({false, true});
    struct stat info{};
    CHECK(::fstat(descriptors->buffered.get(), &info) == 0 &&
          file->size() == static_cast<uint64_t>(info.st_size));
    return file->size();
}

int error_of(const std::shared_ptr<File>& file) {
    try {
        (void)size_of(file);
        return 0;
    } catch (const IoError& error) {
        CHECK(error.path == file->path() && error.operation == "open again");
        CHECK(error.detail.find("ulimit -n") != std::string::npos);
        return error.code;
    }
}

// The tests below need a file system that says when a file was born.
bool can_close(const TemporaryDirectory& directory) {
    const auto file = open_by_name(directory / "probe");
    close_all();
    return !is_open(*file);
}

void only_so_many_are_open(const TemporaryDirectory& directory) {
    const size_t before = open_now();
    std::vector<std::shared_ptr<File>> files;
    for (int i = 0; i < 200; ++i) {
        files.push_back(open_by_name(directory / ("many" + std::to_string(i))));
        files.back()->truncate(static_cast<uint64_t>(i));
    }
    CHECK(OpenFiles::get().open_descriptors() <= 64 && open_now() <= before + 64);
    CHECK(!is_open(*files[0]) && is_open(*files[199]));
    for (uint64_t i = 0; i < 200; ++i) CHECK(size_of(files[i]) == i);
    CHECK(is_open(*files[199]) && !is_open(*files[100]));
    CHECK(size_of(files[170]) == 170);  // now it is used later than those after it
    for (int i = 0; i < 25; ++i) (void)size_of(files[static_cast<size_t>(i)]);
    CHECK(is_open(*files[170]) && !is_open(*files[171]));
    CHECK(open_now() <= before + 64);
    files.clear();
    CHECK(OpenFiles::get().open_descriptors() == 0 && open_now() <= before);
}

void what_is_held_stays_open(const TemporaryDirectory& directory) {
    const auto held = open_by_name(directory / "held");
    const auto other = open_by_name(directory / "other");
    {
        const std::shared_ptr<const Descriptors> descriptors = held->descriptors();
        close_all();
        CHECK(is_open(*held) && !is_open(*other));
        CHECK(::fcntl(descriptors->any(), F_GETFD) == FD_CLOEXEC);
    }
    close_all();
    CHECK(!is_open(*held));
    const int number = held->fileno();
    close_all();
    CHECK(is_open(*held) && held->fileno() == number);
}

void what_has_the_name_now_is_not_taken_for_the_file(const TemporaryDirectory& directory) {
    const std::string path = directory / "replaced";
    const auto file = open_by_name(path);
    close_all();
    CHECK(::rename(path.c_str(), (path + ".moved").c_str()) == 0);
    CHECK(error_of(file) == ENOENT);
    open_file(path);
    CHECK(error_of(file) == ESTALE);
    CHECK(::unlink(path.c_str()) == 0 && ::symlink("replaced.moved", path.c_str()) == 0);
    CHECK(error_of(file) == ESTALE);
    CHECK(::unlink(path.c_str()) == 0 && ::mkfifo(path.c_str(), 0600) == 0);
    CHECK(error_of(file) == ESTALE);
    CHECK(::unlink(path.c_str()) == 0 && ::rename((path + ".moved").c_str(), path.c_str()) == 0);
    CHECK(error_of(file) == 0);
}

// Most file systems give the next file the inode of the one that went.
void an_inode_that_is_used_again_is_another_file(const TemporaryDirectory& directory) {
    const std::string path = directory / "inode";
    const auto file = open_by_name(path);
    struct stat before{};
    CHECK(::stat(path.c_str(), &before) == 0);
    close_all();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a tick of the clock of the file system
    CHECK(::unlink(path.c_str()) == 0);
    std::vector<std::shared_ptr<File>> others;
    struct stat after{};
    for (int i = 0; i < 20 && after.st_ino != before.st_ino; ++i) {
        const std::string name = path + std::to_string(i);
        others.push_back(open_file(name));
        CHECK(::stat(name.c_str(), &after) == 0);
        if (after.st_ino == before.st_ino) CHECK(::rename(name.c_str(), path.c_str()) == 0);
    }
    CHECK(error_of(file) == (after.st_ino == before.st_ino ? ESTALE : ENOENT));
}

void a_file_without_its_name_stays_open(const TemporaryDirectory& directory) {
    const std::string path = directory / "nameless";
    const auto file = open_by_name(path);
    file->truncate(5);
    CHECK(::unlink(path.c_str()) == 0);
    close_all();
    CHECK(is_open(*file) && size_of(file) == 5);

    const auto warned = open_by_name(path);
    warned->truncate(6);
    close_all();
    CHECK(!is_open(*warned));
    std::string whole(4096, '\0');
    CHECK(::realpath(path.c_str(), whole.data()) != nullptr);
    whole.resize(std::strlen(whole.c_str()));
    OpenFiles::get().keep_open(whole + "other");
    CHECK(!is_open(*warned));
    OpenFiles::get().keep_open(whole.substr(0, whole.rfind('/')));
    CHECK(is_open(*warned));
    CHECK(::unlink(path.c_str()) == 0);
    close_all();
    CHECK(size_of(warned) == 6);
}

void the_directory_and_links_may_change(const TemporaryDirectory& directory) {
    CHECK(::mkdir((directory / "blobs").c_str(), 0700) == 0);
    open_file(directory / "blobs/one")->truncate(1);
    open_file(directory / "blobs/two")->truncate(2);
    CHECK(::symlink("blobs/one", (directory / "link").c_str()) == 0);
    const auto file = open_by_name(directory / "link", true, Access::kRead);
    close_all();
    CHECK(::unlink((directory / "link").c_str()) == 0);
    CHECK(::symlink("blobs/two", (directory / "link").c_str()) == 0);
    const std::filesystem::path here = std::filesystem::current_path();
    std::filesystem::current_path("/");
    CHECK(!is_open(*file) && size_of(file) == 1);
    std::filesystem::current_path(here);
}

void a_file_that_was_made_read_only_is_read(const TemporaryDirectory& directory) {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) return;
    const std::string path = "/tmp/swapper_read_only." + std::to_string(::getpid());
    {
        const auto file = open_by_name(path);
        file->truncate(7);
        CHECK(::chmod(path.c_str(), 0400) == 0);
        close_all();
        if (!is_open(*file)) {
            CHECK(size_of(file) == 7);
            CHECK_THROWS(IoError, file->truncate(1));
            CHECK(::chmod(path.c_str(), 0600) == 0);
            file->truncate(1);
            CHECK(size_of(file) == 1 && file->descriptors()->writable);
            CHECK(::chmod(path.c_str(), 0) == 0);
            close_all();
            CHECK(error_of(file) == EACCES);
        }
    }
    CHECK(::unlink(path.c_str()) == 0);
    if (::getuid() == 0) CHECK(::seteuid(0) == 0);
    (void)directory;
}

void without_descriptors_others_are_closed(const TemporaryDirectory& directory) {
    std::vector<std::shared_ptr<File>> files;
    for (int i = 0; i < 8; ++i) files.push_back(open_by_name(directory / ("few" + std::to_string(i))));
    close_all();
    for (size_t i = 0; i < 4; ++i) CHECK(size_of(files[i]) == 0);
    std::vector<UniqueFd> taken;
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken.emplace_back(fd);
    CHECK(errno == EMFILE);
    for (int turn = 0; turn < 3; ++turn) {
        for (const auto& file : files) CHECK(error_of(file) == 0);
    }
    CHECK(open_file(directory / "new")->size() == 0);
    {
        std::vector<std::shared_ptr<const Descriptors>> held;
        std::vector<std::shared_ptr<File>> refused;
        for (const auto& file : files) {
            try {
                held.push_back(file->descriptors({false, true}));
            } catch (const IoError& error) {
                CHECK(error.code == EMFILE);
                refused.push_back(file);
            }
        }
        CHECK(!refused.empty() && error_of(refused[0]) == EMFILE);
        held.clear();
        CHECK(error_of(refused[0]) == 0);
    }
}

// What is read is always the file's, whoever closes it meanwhile, and removes others.
void threads_read_more_files_than_may_be_open(const TemporaryDirectory& directory, BackendKind kind,
                                              bool direct) {
    EngineOptions options;
    options.backend = kind;
    options.block_bytes = kBlock;
    options.queue_depth = 8;
    options.threads = 2;
    Engine engine(options);
    constexpr size_t kFiles = 100;
    std::vector<std::shared_ptr<File>> files;
    std::vector<char> data(kLength);
    for (size_t i = 0; i < kFiles; ++i) {
        files.push_back(open_by_name(directory / ("read" + std::to_string(i)), direct));
        fill(data.data(), kLength, i);
        const auto written = engine.start(Operation::kWrite, files.back(), data.data(), kLength, 0);
        CHECK(written->wait(60000) && !written->failed());
    }
    std::atomic<bool> over{false};
    std::thread closer([&over] {
        while (!over) {
            (void)OpenFiles::get().close_one();
            std::this_thread::yield();
        }
    });
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < 3; ++thread) {
        threads.emplace_back([&, thread] {
            std::vector<char> found(10 * kLength);
            std::vector<char> wanted(kLength);
            for (size_t turn = 0; turn < 30; ++turn) {
                std::vector<std::shared_ptr<Transfer>> transfers;
                for (size_t i = 0; i < 10; ++i) {
                    const auto& file = files[(thread * 31 + turn * 7 + i * 11) % kFiles];
                    transfers.push_back(
                        engine.start(Operation::kRead, file, found.data() + i * kLength, kLength, 0));
                }
                for (size_t i = 0; i < 10; ++i) {
                    CHECK(transfers[i]->wait(60000) && !transfers[i]->failed());
                    fill(wanted.data(), kLength, (thread * 31 + turn * 7 + i * 11) % kFiles);
                    CHECK(std::memcmp(wanted.data(), found.data() + i * kLength, kLength) == 0);
                }
                CHECK(size_of(files[turn]) == kLength);
                files[turn]->check_written();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    over = true;
    closer.join();
    CHECK(OpenFiles::get().open_descriptors() <= 64);
}

void a_file_that_cannot_be_opened_fails_its_transfer(const TemporaryDirectory& directory, BackendKind kind) {
    EngineOptions options;
    options.backend = kind;
    options.block_bytes = kBlock;
    Engine engine(options);
    const auto lost = open_by_name(directory / "lost");
    const auto found = open_by_name(directory / "found");
    lost->truncate(kLength);
    found->truncate(kLength);
    close_all();
    CHECK(::unlink((directory / "lost").c_str()) == 0);
    std::vector<char> data(kLength);
    for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
        const auto transfer = engine.start(operation, lost, data.data(), kLength, 0);
        CHECK(transfer->wait(60000) && transfer->failed() && transfer->error().code == ENOENT);
        CHECK(transfer->error().path == lost->path());
    }
    const auto transfer = engine.start(Operation::kRead, found, data.data(), kLength, 0);
    CHECK(transfer->wait(60000) && !transfer->failed());
}

void transfers_wait_for_descriptors(const TemporaryDirectory& directory, BackendKind kind) {
    EngineOptions options;
    options.backend = kind;
    options.block_bytes = kBlock;
    Engine engine(options);
    std::vector<std::shared_ptr<File>> files;
    for (int i = 0; i < 4; ++i) {
        files.push_back(open_by_name(directory / ("waits" + std::to_string(i))));
        files.back()->truncate(kLength);
    }
    close_all();
    std::vector<UniqueFd> taken;
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken.emplace_back(fd);
    std::vector<char> data(4 * kLength);
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (size_t i = 0; i < 4; ++i) {
        transfers.push_back(engine.start(Operation::kRead, files[i], data.data() + i * kLength, kLength, 0));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    for (const auto& transfer : transfers) CHECK(!transfer->done());
    taken.resize(taken.size() - 1);  // One at a time, if the file is direct.
    if (!files[0]->direct()) taken.resize(taken.size() - 1);
    for (const auto& transfer : transfers) CHECK(transfer->wait(60000) && !transfer->failed());
    close_all();
    for (int fd; (fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) taken.emplace_back(fd);
    const auto refused = engine.start(Operation::kRead, files[0], data.data(), kLength, 0);
    CHECK(refused->wait(60000) && refused->failed() && refused->error().code == EMFILE);
    taken.clear();
    const auto again = engine.start(Operation::kRead, files[0], data.data(), kLength, 0);
    CHECK(again->wait(60000) && !again->failed());
}

// As for a read that nobody wants any more, of a record that is forgotten.
void transfers_go_on_when_the_name_goes(const TemporaryDirectory& directory) {
    EngineOptions options;
    options.block_bytes = kBlock;
    options.queue_depth = 1;
    Engine engine(options);
    std::vector<char> data(64 * kLength);
    std::vector<std::shared_ptr<Transfer>> transfers;
    std::vector<std::shared_ptr<File>> files;
    for (size_t i = 0; i < 64; ++i) {
        files.push_back(open_by_name(directory / ("going" + std::to_string(i))));
        files.back()->truncate(kLength);
    }
    close_all();
    for (size_t i = 0; i < 64; ++i) {
        transfers.push_back(engine.start(Operation::kRead, files[i], data.data() + i * kLength, kLength, 0));
    }
    for (size_t i = 64; i-- > 0;) {
        files[i]->leave_name();
        CHECK(::unlink(files[i]->path().c_str()) == 0);
        files[i].reset();
    }
    for (const auto& transfer : transfers) CHECK(transfer->wait(60000) && !transfer->failed());
}

// Few bytes that are no page go through the page cache, also where the file is direct.
void what_goes_through_the_page_cache_is_noted(const TemporaryDirectory& directory) {
    Engine engine(EngineOptions{});
    const auto file = open_by_name(directory / "cached");
    std::vector<char> data(kLength);
    const auto write = [&](uint64_t length) {
        const auto transfer = engine.start(Operation::kWrite, file, data.data(), length, 0);
        CHECK(transfer->wait(60000) && !transfer->failed());
    };
    if (file->direct()) {
        write(kLength);
        CHECK(!file->wrote_buffered());
    }
    write(13);
    CHECK(file->wrote_buffered());
    close_all();
    CHECK(!is_open(*file));
    file->check_written();
    CHECK(!is_open(*file));
}

// A child finds no lock held, whatever other threads did when it was made.
void children_find_files_as_they_were(const TemporaryDirectory& directory) {
    std::vector<std::shared_ptr<File>> files;
    for (int i = 0; i < 40; ++i) {
        files.push_back(open_by_name(directory / ("child" + std::to_string(i))));
        files.back()->truncate(static_cast<uint64_t>(i));
    }
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
#ifndef __SANITIZE_ADDRESS__  // Its allocator stays locked in a child made while a thread allocates.
    for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&] {
            while (!over) {
                for (const auto& file : files) (void)size_of(file);
            }
        });
    }
#endif
    // These hold the lock most of the time.
    for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&] {
            while (!over) (void)files[0]->opened();
        });
    }
    for (int turn = 0; turn < 50; ++turn) {
        const pid_t child = ::fork();
        CHECK(child >= 0);
        if (child == 0) {
            ::alarm(60);  // It would wait for ever.
            bool right = true;
            for (uint64_t i = 0; i < 40; ++i) right = right && size_of(files[i]) == i;
            ::_exit(right ? 0 : 1);
        }
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    over = true;
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
    const TemporaryDirectory directory;
    limit_descriptors(256);
    if (!can_close(directory)) {
        std::puts("open_files: this file system does not say when a file was born, so all stay open");
        return 0;
    }
    only_so_many_are_open(directory);
    what_is_held_stays_open(directory);
    what_has_the_name_now_is_not_taken_for_the_file(directory);
    an_inode_that_is_used_again_is_another_file(directory);
    a_file_without_its_name_stays_open(directory);
    the_directory_and_links_may_change(directory);
    a_file_that_was_made_read_only_is_read(directory);
    without_descriptors_others_are_closed(directory);
    for (const BackendKind kind : {BackendKind::kThreads, BackendKind::kAio, BackendKind::kUring}) {
        if (!swapper::probe_backend(kind, false).empty()) continue;
        threads_read_more_files_than_may_be_open(directory, kind, true);
        threads_read_more_files_than_may_be_open(directory, kind, false);
        a_file_that_cannot_be_opened_fails_its_transfer(directory, kind);
        transfers_wait_for_descriptors(directory, kind);
    }
    transfers_go_on_when_the_name_goes(directory);
    what_goes_through_the_page_cache_is_noted(directory);
    children_find_files_as_they_were(directory);
    std::puts("open_files: passed");
    return 0;
}
