#include "crew.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace swapper {
namespace {

class Crew {
  public:
    // Of this process. Never destroyed: its threads end with the process.
    static Crew& of_process() {
        static std::atomic<Crew*> current{nullptr};
        Crew* crew = current.load(std::memory_order_acquire);
        if (crew == nullptr || crew->owner_ != getpid()) {
            // After a fork the threads of the other are not there, and its locks may be held.
            Crew* const made = new Crew;
            if (current.compare_exchange_strong(crew, made, std::memory_order_acq_rel)) return *made;
            delete made;
        }
        return *crew;
    }

    // Has up to `count` of its threads call `work`. False if it is busy for another, or has no thread.
    bool begin(std::size_t count, const std::function<void()>& work) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (work_ != nullptr) return false;
            hire(count);
            if (size_ == 0) return false;
            work_ = &work;
            places_ = count;
            std::fegetenv(&floats_);
        }
        begun_.notify_all();
        return true;
    }

    // Returns when all that have begun have ended. Those that have not do not begin any more.
    void end() {
        std::unique_lock<std::mutex> lock(mutex_);
        places_ = 0;
        ended_.wait(lock, [this] { return working_ == 0; });
        work_ = nullptr;
    }

    // True if a thread that was to begin has not, and now does not: then its work is the caller's.
    bool take_place() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (places_ == 0) return false;
        --places_;
        return true;
    }

  private:
    void hire(std::size_t wanted) {
        if (size_ >= wanted) return;
        // Signals are the program's: threads inherit what is blocked here.
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; size_ < wanted; ++size_) std::thread([this] { live(); }).detach();
        } catch (const std::exception&) {
            // No more threads, or memory for one, to be had: those there are do all of it.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void live() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            begun_.wait(lock, [this] { return places_ != 0; });
            --places_;
            ++working_;
            const std::function<void()>& work = *work_;
            const std::fenv_t floats = floats_;
            lock.unlock();
            std::fesetenv(&floats);
            work();
            lock.lock();
            if (--working_ == 0) ended_.notify_one();
        }
    }

    const pid_t owner_ = getpid();
    std::mutex mutex_;  // for what follows
    std::condition_variable begun_;
    std::condition_variable ended_;
    const std::function<void()>* work_ = nullptr;  // null: nobody's
    std::size_t places_ = 0;                       // threads that may still begin
    std::size_t working_ = 0;                      // threads that have begun and not ended
    std::size_t size_ = 0;
    std::fenv_t floats_{};  // how the caller rounds, and whether it takes denormals for zero
};

}  // namespace

void run_on_crew(std::size_t threads, const std::function<void()>& work) {
    if (threads <= 1) return work();
    Crew& crew = Crew::of_process();
    const bool has_begun = crew.begin(threads - 1, work);
    work();
    if (has_begun) crew.end();
}

CrewWork::CrewWork(std::size_t threads, std::function<void()> work)
    : work_(std::move(work)),
      joins_(threads > 1),
      is_begun_(Crew::of_process().begin(threads > 1 ? threads - 1 : 1, work_)),
      owner_(getpid()) {}

CrewWork::~CrewWork() {
    wait();
}

void CrewWork::wait() {
    if (is_ended_ || owner_ != getpid()) return;  // After a fork its threads are the parent's.
    if (is_begun_) {
        Crew& crew = Crew::of_process();
        if (joins_ || crew.take_place()) work_();
        crew.end();
    } else {
        work_();
    }
    is_ended_ = true;
}

}  // namespace swapper
