//! The moment at which the ids of a layer are known: its experts are requested, and the program's
//! copies of them are left out.

use std::time::{Duration, Instant};

use sidecar_core::config::Config;
use sidecar_core::trace::Ids;

use super::figures::FIGURES;
use super::plan::{Layer, Product};
use super::state::{Order, State};
use super::transfer::{Fetcher, Progress, Request};
use crate::ggml::{Backend, Ggml};
use crate::program::own_cache;

/// The share of used experts, in percent, from which all experts of the next layer are copied. Each
/// byte costs time on the link, unlike reads of neighbours from disk (`sidecar_core::stream`).
const NEARLY_ALL: usize = 90;

/// Returns whether a copy of the program is left out, of a matrix or of bytes of it: its experts are in
/// slots, or the request of an early copy has the bytes that `covers` checks.
pub fn leaves_out(
    fetcher: &Fetcher,
    layer: &Layer,
    product: &Product,
    bytes: usize,
    covers: impl FnOnce(&Request) -> bool,
) -> bool {
    let has_slots = layer.slots.as_ref().is_some_and(|slots| slots.ready);
    let transfer = &product.transfer;
    let requested = transfer.progress() != Progress::Idle;
    let covered = !has_slots && requested && covers(&transfer.request());
    let may_miss = !Config::get().postfetch.block_on_miss;
    let left_out = has_slots || covered && !(may_miss && fetcher.take_back(transfer));
    if left_out {
        FIGURES.lock().left_out_bytes += bytes as u64;
    }
    left_out
}

impl State {
    /// Requests the input of the experts of a layer, which the CPU may compute once the ids are
    /// known.
    ///
    /// # Safety
    ///
    /// The backend that computed the ids of the layer, on the thread that evaluates.
    pub unsafe fn request_input(&mut self, at: usize, backend: *mut Backend) {
        let computes_misses = self.computes_misses();
        let layer = self.plan.as_mut().map(|plan| &mut plan.layers[at]);
        if let Some(layer) = layer.filter(|of| of.backend == backend && computes_misses)
            && let Some(slots) = &mut layer.slots
            && let Some(on_cpu) = &mut slots.on_cpu
        {
            // SAFETY: the backend of the products, which computed the input before the ids.
            unsafe { on_cpu.request_input(backend) };
        }
    }

    /// Requests the experts of a layer whose ids are known, and all of the next layer if nearly
    /// all of this one are used.
    pub fn known(&mut self, ggml: &'static Ggml, at: usize, ids: &Ids<'_>) {
        let Some(plan) = &mut self.plan else {
            return;
        };
        let layer = &mut plan.layers[at];
        if std::mem::replace(&mut layer.known, true) || self.order != Order::Expected {
            return;
        }
        // The program ends itself at an id that is not valid.
        let Some(used) = self.used.mark(ids, layer.experts) else {
            return;
        };
        for product in &mut layer.products {
            product.used_bytes = self.used.bytes(product.expert_bytes);
        }
        if let Some(slots) = &mut layer.slots {
            let Some(cache) = &mut self.cache else {
                return;
            };
            let on_cpu = slots.on_cpu.as_mut().filter(|of| of.is_ready());
            // As long as the layer before took, the link has time for this one.
            let since = self.looked_up.replace(Instant::now());
            let time = since.map_or(Duration::ZERO, |since| since.elapsed());
            let is_idle = || self.fetcher.as_ref().is_some_and(Fetcher::is_idle);
            let most = match Config::get().program_postfetch.cache_uploads {
                0 if on_cpu.is_some() && is_idle() => cache.copied_in(slots.at, time),
                most => most,
            };
            let of_layer = cache.layer(slots.at);
            slots.waits = on_cpu.is_none();
            slots.ready = match on_cpu {
                Some(on_cpu) => {
                    let ready = of_layer.look_up_now(ids, most, &mut on_cpu.missed);
                    on_cpu.gather(ids);
                    ready
                }
                None => of_layer.look_up(ids),
            };
            if slots.ready && of_layer.has_loads() {
                self.uploads |= !slots.waits;
                self.request(ggml, at);
            }
            return;
        }
        if let Some(cache) = &mut self.cache {
            cache.note(layer.model, layer.number, ids);
        }
        self.nearly_all = used * 100 >= layer.experts as usize * NEARLY_ALL;
        if !own_cache::mark_slots(layer.products[0].weight, &mut self.in_own_cache) {
            return;
        }
        layer.is_whole = !self.in_own_cache.contains(&true);
        if !layer.ahead {
            FIGURES.lock().layers += 1;
            self.request(ggml, at);
        }
        self.look_ahead(ggml, at + 1);
    }

    /// Requests all experts of a layer if nearly all will be used.
    pub fn look_ahead(&mut self, ggml: &'static Ggml, at: usize) {
        let Some(plan) = &mut self.plan else {
            return;
        };
        let looks_ahead = self.nearly_all && plan.looks_ahead && self.order == Order::Expected;
        // The program would copy experts from there to the same place meanwhile.
        let looks_ahead = looks_ahead && !own_cache::exists();
        let may_look_ahead = |layer: &&mut Layer| layer.may_use_all && layer.slots.is_none();
        let layer = plan.layers.get_mut(at).filter(may_look_ahead);
        if let Some(layer) = layer.filter(|_| looks_ahead) {
            (layer.ahead, layer.is_whole) = (true, true);
            FIGURES.lock().layers_ahead += 1;
            self.used.mark_all(layer.experts);
            self.request(ggml, at);
        }
    }

    /// Requests the marked experts of a layer, or those that are to be loaded into its slots.
    fn request(&mut self, ggml: &'static Ggml, at: usize) {
        let (Some(plan), Some(fetcher)) = (&mut self.plan, &self.fetcher) else {
            return;
        };
        let layer = &mut plan.layers[at];
        let logs = Config::get().postfetch.debug;
        let mut matrices = Vec::new();
        // Recorded in the evaluation before, and complete: ids that were computed later are known.
        // ggml's Vulkan backend reuses events that were waited for, and the wait must be on the
        // thread that uses their backend.
        layer.free.wait();
        // SAFETY: the backend of the layer, on the thread that evaluates.
        unsafe { layer.free.record(layer.backend) };
        for (role, product) in layer.products.iter().enumerate() {
            // SAFETY: the matrix is live as long as the graph.
            let from: usize = unsafe { ggml.layout.read(product.weight, ggml.layout.data) };
            let mut request = product.transfer.next_request();
            request.after = Some(layer.free.clone());
            match (&layer.slots, &mut self.cache) {
                (Some(slots), Some(cache)) => {
                    let of_layer = cache.layer(slots.at);
                    of_layer.pieces(role, from, &mut request.pieces);
                }
                _ => {
                    let without = &self.in_own_cache;
                    self.used
                        .pieces(from, product.expert_bytes, without, &mut request.pieces);
                }
            }
            drop(request);
            fetcher.queue(&product.transfer);
            if logs {
                matrices.push((from, product.expert_bytes));
            }
        }
        if logs {
            layer.requested = Some(Instant::now());
            layer.log_requested(&matrices);
        }
    }
}
