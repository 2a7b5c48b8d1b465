//! The calls of a program that a capability cannot do without.
//!
//! A call arrives if it goes through the loader. An object that defines a function and has no slot for it calls its own
//! definition (`-Bsymbolic`, link-time optimisation), and such a call is never seen. A capability that does not find
//! that memory is freed, or that an evaluation runs, is unsafe: it is off where a call of its list cannot arrive.

use crate::loader::caller::{Caller, Hook};
use crate::loader::{linked, loaded};

/// What a capability must find to be safe.
struct Needs {
    /// From the object that loads models.
    of_program: &'static [Hook],
    /// From that object, if a device besides the CPU evaluates.
    beside_gpu: &'static [Hook],
    /// From the object that has the scheduler.
    of_scheduler: &'static [Hook],
}

/// How the memory of a model ends. Whether its buffers are [watched](crate::ggml::Ggml::watch) makes
/// [`Hook::BufferFree`] unnecessary.
const ENDS: [Hook; 2] = [Hook::BufferFree, Hook::ContextFree];

/// Hot-swap: descriptors are written while nothing reads them. Without [`Hook::SchedReset`], a graph counts as kept
/// until the next one, which only delays a switch on the CPU.
const HOT_SWAP: Needs = Needs {
    of_program: &[
        ENDS[0],
        ENDS[1],
        Hook::SchedReserve,
        Hook::SchedAllocGraph,
        Hook::SchedCompute,
        Hook::SchedFree,
    ],
    beside_gpu: &[Hook::SchedReset, Hook::SchedSynchronize, Hook::BackendFree],
    of_scheduler: &[],
};

/// Expert streaming: memory is mapped over the program's mapping of a file, which must still be that.
const STREAMING: Needs = Needs {
    of_program: &[ENDS[0], ENDS[1], Hook::SchedAllocGraph],
    beside_gpu: &[Hook::SchedCompute],
    of_scheduler: &[],
};

/// The expert trace: ids are read in the graph that was evaluated. Its memory has the places of the graph that was
/// reserved, where ids that are not marked there are overwritten.
const TRACE: Needs = Needs {
    of_program: &[
        ENDS[0],
        ENDS[1],
        Hook::SchedReserve,
        Hook::SchedAllocGraph,
        Hook::SchedCompute,
        Hook::SchedFree,
    ],
    beside_gpu: &[Hook::SchedReset, Hook::SchedSynchronize, Hook::BackendFree],
    of_scheduler: &[],
};

/// Post-fetch and the expert cache: copies of the scheduler are left out, so each of its steps must arrive.
const POST_FETCH: Needs = Needs {
    of_program: &[
        ENDS[0],
        ENDS[1],
        Hook::SchedAllocGraph,
        Hook::SchedReset,
        Hook::SchedCompute,
        Hook::SchedSynchronize,
        Hook::SchedFree,
        Hook::BackendFree,
    ],
    beside_gpu: &[],
    of_scheduler: &[
        Hook::OffloadOp,
        Hook::TensorGetAsync,
        Hook::BackendSynchronize,
        Hook::TensorSetAsync,
        Hook::BackendCompute,
    ],
};

/// Why capabilities are unsafe in a program, with the next step; `None` for those that are safe.
pub struct Unreached {
    /// Of hot-swap.
    pub hot_swap: Option<String>,
    /// Of expert streaming.
    pub streaming: Option<String>,
    /// Of the expert trace.
    pub trace: Option<String>,
    /// Of post-fetch and the expert cache.
    pub post_fetch: Option<String>,
}

impl Unreached {
    /// Looks at a program whose object `caller` loads models. `has_gpu`: whether a device besides the CPU evaluates;
    /// `is_watched`: whether the end of each buffer with weights is seen at the buffer.
    pub fn of(caller: &'static Caller, has_gpu: bool, is_watched: bool) -> Unreached {
        let why = |needs: &Needs| needs.unreached(caller, has_gpu, is_watched);
        Unreached {
            hot_swap: why(&HOT_SWAP),
            streaming: why(&STREAMING),
            trace: why(&TRACE),
            post_fetch: why(&POST_FETCH),
        }
    }
}

impl Needs {
    fn unreached(
        &self,
        caller: &'static Caller,
        has_gpu: bool,
        is_watched: bool,
    ) -> Option<String> {
        let beside_gpu = self.beside_gpu.iter().filter(|_| has_gpu);
        let of_program = self.of_program.iter().chain(beside_gpu);
        let of_program = of_program.filter(|hook| !is_watched || **hook != Hook::BufferFree);
        let scheduler = || Caller::of(caller.symbol(Hook::SchedCompute.name()) as usize);
        let of_program = of_program.map(|hook| (caller, *hook));
        let of_scheduler = self.of_scheduler.iter().map(|hook| (scheduler(), *hook));
        let of_program = of_program.map(|(object, hook)| (object, hook, object.unseen(hook)));
        let of_scheduler = of_scheduler.map(|(object, hook)| {
            // Within one file, a compiler may put a function into its callers, also if others call it.
            let within = "the scheduler need not call it where ggml is linked into the program";
            let unseen = object.is_linked().then_some(within);
            (object, hook, unseen.or_else(|| object.unseen(hook)))
        });
        let mut unseen = of_program.chain(of_scheduler);
        let (object, hook, why) =
            unseen.find_map(|(object, hook, why)| Some((object, hook, why?)))?;
        let path = object.name();
        let name = match path.rsplit(|byte| *byte == b'/').next() {
            None | Some([]) => "the program".into(),
            Some(name) => String::from_utf8_lossy(name),
        };
        Some(format!(
            "{name} calls its own {}, which the drop-in does not see and needs ({why}): use a build with shared libraries, without -Bsymbolic and link-time optimisation",
            hook.name().to_string_lossy(),
        ))
    }
}

impl Caller {
    /// Returns why calls of a function that this object defines do not arrive, if so.
    fn unseen(&self, hook: Hook) -> Option<&'static str> {
        if self.is_linked() {
            return linked::unseen(hook.name());
        }
        let bound = loaded::look(|objects, _| {
            let object = objects.iter().find(|object| self.is(object))?;
            Some(object.defines(hook.name()) && object.reference(hook.name()).is_none())
        });
        let is_bound = bound.flatten() == Some(true);
        is_bound.then_some("the call does not go through the loader")
    }
}
