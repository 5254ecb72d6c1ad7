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

    void run(std::size_t others, const std::function<void()>& work) {
        const std::unique_lock<std::mutex> mine(in_use_, std::try_to_lock);
        if (!mine.owns_lock()) return work();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            hire(others);
            work_ = &work;
            places_ = others;
            std::fegetenv(&floats_);
        }
        begun_.notify_all();
        work();
        std::unique_lock<std::mutex> lock(mutex_);
        places_ = 0;
        ended_.wait(lock, [this] { return working_ == 0; });
        work_ = nullptr;
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
    std::mutex in_use_;  // by the caller whose work is done
    std::mutex mutex_;   // for what follows
    std::condition_variable begun_;
    std::condition_variable ended_;
    const std::function<void()>* work_ = nullptr;
    std::size_t places_ = 0;   // threads that may still begin
    std::size_t working_ = 0;  // threads that have begun and not ended
    std::size_t size_ = 0;
    std::fenv_t floats_{};  // how the caller rounds, and whether it takes denormals for zero
};

}  // namespace

void run_on_crew(std::size_t threads, const std::function<void()>& work) {
    if (threads <= 1) return work();
    Crew::of_process().run(threads - 1, work);
}

}  // namespace swapper
