//! The CPUs and the priority of the calling thread.

use crate::descriptors::above_standard;

/// Gives this thread the CPUs of all threads of the process, and the ordinary scheduling policy in
/// place of a real-time policy. Otherwise, it has what the thread that started it has: ggml binds
/// threads that compute to CPUs (`--cpu-mask`, `--cpu-strict`) and gives them real-time policies
/// (`--prio`). A failure has no effect but on speed.
pub fn clear_placement() {
    let own = affinity(0);
    let tasks = above_standard(|| {
        #[expect(clippy::disallowed_methods, reason = "with a number above 2")]
        std::fs::read_dir("/proc/self/task")
    })
    .into_iter()
    .flatten();
    let ids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
    let others = ids.filter_map(affinity);
    // SAFETY: the sets have the size that is given; the parameter is read during the call.
    unsafe {
        if let Some(all) = own.map(|own| others.fold(own, with)) {
            libc::sched_setaffinity(0, size_of_val(&all), &raw const all);
        }
        if matches!(
            libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK,
            libc::SCHED_FIFO | libc::SCHED_RR
        ) {
            let ordinary = libc::sched_param { sched_priority: 0 };
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &raw const ordinary);
        }
    }
}

/// Returns the CPUs of a thread, or of this thread for 0; `None` when the thread has ended, or
/// the machine has more CPUs than the set.
fn affinity(thread: libc::pid_t) -> Option<libc::cpu_set_t> {
    let mut set = std::mem::MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: fills the set, of which all zeros is a valid value, too.
    unsafe {
        let failed = libc::sched_getaffinity(thread, size_of_val(&set), set.as_mut_ptr());
        (failed == 0).then(|| set.assume_init())
    }
}

/// Returns the CPUs that are in one of two sets.
fn with(mut one: libc::cpu_set_t, other: libc::cpu_set_t) -> libc::cpu_set_t {
    for cpu in 0..libc::CPU_SETSIZE as usize {
        // SAFETY: the sets have so many CPUs.
        unsafe {
            if libc::CPU_ISSET(cpu, &other) {
                libc::CPU_SET(cpu, &mut one);
            }
        }
    }
    one
}

/// Lowers the CPU and I/O priority of this thread. A failure has no effect but on speed.
pub fn lower_priority() {
    const WHO_PROCESS: libc::c_int = 1;
    const IDLE_CLASS: libc::c_long = 3;
    const CLASS_SHIFT: libc::c_int = 13;
    const LOWEST_BEST_EFFORT: libc::c_int = (2 << CLASS_SHIFT) | 7;
    // SAFETY: system calls without pointers, which on Linux act on the calling thread.
    unsafe {
        libc::nice(10);
        let now = libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0);
        if now >> CLASS_SHIFT != IDLE_CLASS {
            libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, LOWEST_BEST_EFFORT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_a_bound_thread_has_the_cpus_of_all() {
        let all = affinity(0).expect("at most 1024 CPUs");
        let policy = std::thread::spawn(move || {
            // SAFETY: sets and parameters that live during the calls, which change this thread.
            let (bound, real_time) = unsafe {
                let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| libc::CPU_ISSET(*cpu, &all));
                let mut one = std::mem::zeroed();
                libc::CPU_SET(first.expect("a CPU"), &mut one);
                let bound = libc::sched_setaffinity(0, size_of_val(&one), &raw const one);
                let parameter = libc::sched_param { sched_priority: 1 };
                let policy = libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter);
                (bound, policy == 0)
            };
            assert_eq!(bound, 0);
            let clear = || {
                clear_placement();
                // SAFETY: a system call without pointers.
                (affinity(0), unsafe { libc::sched_getscheduler(0) })
            };
            let (cleared, policy) = std::thread::spawn(clear).join().expect("no panic");
            let cleared = cleared.expect("at most 1024 CPUs");
            // SAFETY: compares two sets.
            assert!(unsafe { libc::CPU_EQUAL(&cleared, &all) });
            real_time.then_some(policy)
        });
        match policy.join().expect("no panic") {
            Some(policy) => assert_eq!(policy, libc::SCHED_OTHER),
            None => println!("not checked: this user may not choose a real-time policy"),
        }
    }
}
