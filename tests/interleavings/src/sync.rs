//! What `crate::sync` of the product is here: the same names, over loom. Loom executes a test once for each
//! interleaving of its threads, and for each value that the memory model lets a load return.
//!
//! Loom takes a sequentially consistent access for one that acquires and releases, but has such fences. Here, one
//! lies between a store of that kind and the next load of that kind in the same thread: without it, each of two
//! threads could miss the store of the other.
//!
//! Time passes only in waits. Constants that are made outside of a test, such as statics, begin each execution
//! with their first value.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ops::{Add, Deref, DerefMut, Sub};
use std::sync::atomic::AtomicU64 as Count;
use std::time::Duration;

pub use loom::hint::spin_loop;
pub use loom::sync::atomic::Ordering;
use loom::sync::atomic::{self, fence};

/// Counts executions of all tests.
static EXECUTIONS: Count = Count::new(0);
/// The time, in nanoseconds.
static TIME: Count = Count::new(0);
/// How long each wait with a limit takes, in nanoseconds; 0 for a wait that only a notification ends.
static WAIT: Count = Count::new(0);
/// How many waits of this execution have ended at once.
static SHORT: Count = Count::new(0);

/// Waits with a limit that end at once, in each execution: the thread looks again in the middle of what others
/// do. Later waits end when no other thread can go on.
const MOST_SHORT: u64 = 3;

/// Executes a test once for each interleaving, and writes how many there were. If there are too many, executes
/// those with at most `preemptions`, and with one more in the long form of the tests. A wait with a limit takes
/// `wait` of the time and ends without a notification; if `wait` is zero, only a notification ends it. One test
/// of the process runs at a time.
pub fn explore(
    preemptions: Option<usize>,
    wait: Duration,
    test: impl Fn() + Send + Sync + 'static,
) {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(|failed| failed.into_inner());
    let order = Ordering::Relaxed;
    let before = EXECUTIONS.load(order);
    WAIT.store(wait.as_nanos() as u64, order);
    let mut model = loom::model::Builder::new();
    let is_long = std::env::var_os("SIDECAR_LONG_TESTS").is_some();
    model.preemption_bound = preemptions.map(|most| most + usize::from(is_long));
    model.max_branches = 10_000;
    model.check(move || {
        EXECUTIONS.fetch_add(1, order);
        TIME.store(0, order);
        SHORT.store(0, order);
        test();
    });
    println!("{} executions", EXECUTIONS.load(order) - before);
}

/// A value of the current execution.
#[derive(Debug)]
struct OfExecution<T> {
    execution: Cell<u64>,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> OfExecution<T> {
    const fn new() -> Self {
        OfExecution {
            execution: Cell::new(0),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        }
    }

    fn get(&self, make: impl FnOnce() -> T) -> &T {
        let now = EXECUTIONS.load(Ordering::Relaxed);
        if self.execution.replace(now) != now {
            let made = make();
            // SAFETY: loom's threads take turns on one thread, and the value before is one of an execution that
            // has ended.
            unsafe { (*self.value.get()).write(made) };
        }
        // SAFETY: written above, or by an earlier call of this execution.
        unsafe { (*self.value.get()).assume_init_ref() }
    }
}

loom::thread_local! {
    /// Whether this thread stored with sequential consistency and had no fence since.
    static STORED: Cell<bool> = Cell::new(false);
}

fn loads(order: Ordering) {
    if order == Ordering::SeqCst && STORED.with(|stored| stored.replace(false)) {
        fence(order);
    }
}

fn stores(order: Ordering) {
    if order == Ordering::SeqCst {
        STORED.with(|stored| stored.set(true));
    }
}

/// Does an access that loads and stores.
fn exchanges<R>(order: Ordering, access: impl FnOnce() -> R) -> R {
    loads(order);
    let result = access();
    stores(order);
    result
}

macro_rules! atomic {
    ($name:ident $(<$of:ident>)?, $value:ty) => {
        #[doc = concat!("An `", stringify!($name), "`.")]
        #[derive(Debug)]
        pub struct $name $(<$of>)? {
            first: $value,
            atomic: OfExecution<atomic::$name $(<$of>)?>,
        }

        // SAFETY: loom's threads take turns on one thread.
        unsafe impl $(<$of>)? Sync for $name $(<$of>)? {}
        // SAFETY: as above.
        unsafe impl $(<$of>)? Send for $name $(<$of>)? {}

        #[allow(missing_docs, reason = "as in the standard library")]
        impl $(<$of>)? $name $(<$of>)? {
            pub const fn new(first: $value) -> Self {
                $name { first, atomic: OfExecution::new() }
            }

            fn atomic(&self) -> &atomic::$name $(<$of>)? {
                self.atomic.get(|| atomic::$name::new(self.first))
            }

            pub fn load(&self, order: Ordering) -> $value {
                loads(order);
                self.atomic().load(order)
            }

            pub fn store(&self, value: $value, order: Ordering) {
                self.atomic().store(value, order);
                stores(order);
            }

            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                exchanges(order, || self.atomic().swap(value, order))
            }

            pub fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                order: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                exchanges(order, || self.atomic().compare_exchange(from, to, order, failure))
            }
        }
    };
}

atomic!(AtomicBool, bool);
atomic!(AtomicU8, u8);
atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);
atomic!(AtomicUsize, usize);
atomic!(AtomicPtr<T>, *mut T);

macro_rules! add {
    ($name:ident, $value:ty) => {
        impl Default for $name {
            fn default() -> Self {
                $name::new(0)
            }
        }

        #[allow(missing_docs, reason = "as in the standard library")]
        impl $name {
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                exchanges(order, || self.atomic().fetch_add(value, order))
            }

            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                exchanges(order, || self.atomic().fetch_sub(value, order))
            }
        }
    };
}

add!(AtomicU64, u64);
add!(AtomicUsize, usize);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

#[allow(missing_docs, reason = "as in the standard library")]
impl Instant {
    pub fn now() -> Instant {
        Instant(Duration::from_nanos(TIME.load(Ordering::Relaxed)))
    }

    pub fn elapsed(&self) -> Duration {
        Instant::now() - *self
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0 + time)
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, other: Instant) -> Duration {
        self.0.saturating_sub(other.0)
    }
}

/// A mutex of parking_lot's interface.
#[derive(Debug)]
pub struct Mutex<T> {
    lock: OfExecution<loom::sync::Mutex<()>>,
    value: UnsafeCell<T>,
}

// SAFETY: loom's threads take turns on one thread, and the lock excludes the others.
unsafe impl<T: Send> Sync for Mutex<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Mutex<T> {}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Mutex::new(T::default())
    }
}

#[allow(missing_docs, reason = "as in parking_lot")]
impl<T> Mutex<T> {
    pub const fn new(value: T) -> Mutex<T> {
        Mutex {
            lock: OfExecution::new(),
            value: UnsafeCell::new(value),
        }
    }

    fn guard(&self) -> loom::sync::MutexGuard<'_, ()> {
        let lock = self.lock.get(|| loom::sync::Mutex::new(()));
        lock.lock().expect("a panic ends the test")
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        MutexGuard {
            mutex: self,
            guard: Some(self.guard()),
        }
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(self.lock())
    }

    pub fn is_locked(&self) -> bool {
        let lock = self.lock.get(|| loom::sync::Mutex::new(()));
        lock.try_lock().is_err()
    }

    /// No test forks.
    ///
    /// # Safety
    ///
    /// As in parking_lot.
    pub unsafe fn force_unlock(&self) {
        unimplemented!("no test forks")
    }
}

/// The guard of a [`Mutex`].
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    guard: Option<loom::sync::MutexGuard<'a, ()>>,
}

#[allow(missing_docs, reason = "as in parking_lot")]
impl<T> MutexGuard<'_, T> {
    pub fn unlocked<R>(guard: &mut Self, run: impl FnOnce() -> R) -> R {
        drop(guard.guard.take());
        let result = run();
        guard.guard = Some(guard.mutex.guard());
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held.
        unsafe { &mut *self.mutex.value.get() }
    }
}

/// A condition variable of parking_lot's interface.
#[derive(Debug)]
pub struct Condvar(OfExecution<loom::sync::Condvar>);

// SAFETY: loom's threads take turns on one thread.
unsafe impl Sync for Condvar {}
// SAFETY: as above.
unsafe impl Send for Condvar {}

impl Default for Condvar {
    fn default() -> Self {
        Condvar::new()
    }
}

#[allow(missing_docs, reason = "as in parking_lot")]
impl Condvar {
    pub const fn new() -> Condvar {
        Condvar(OfExecution::new())
    }

    fn condition(&self) -> &loom::sync::Condvar {
        self.0.get(loom::sync::Condvar::new)
    }

    pub fn notify_one(&self) {
        self.condition().notify_one();
    }

    pub fn notify_all(&self) {
        self.condition().notify_all();
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        let held = guard.guard.take().expect("it is locked");
        let held = self.condition().wait(held).expect("a panic ends the test");
        guard.guard = Some(held);
    }

    pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
        let wait = WAIT.load(Ordering::Relaxed);
        if wait == 0 {
            return self.wait(guard);
        }
        MutexGuard::unlocked(guard, || {
            TIME.fetch_add(wait, Ordering::Relaxed);
            if SHORT.fetch_add(1, Ordering::Relaxed) >= MOST_SHORT {
                loom::thread::yield_now();
            }
        });
    }
}
