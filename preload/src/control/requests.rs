//! Requests over the control socket: [`sidecar_core::protocol`] has the messages.

use std::collections::HashSet;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::{Value, json};
use sidecar_core::config::Config;
use sidecar_core::error::Error;
use sidecar_core::protocol::{
    Blocked, FileEvent, FileStatus, Hashes, Metrics, Milliseconds, ModelHash, ModelReload,
    ModelStatus, NoEffect, Overlay, ReloadReport, Reloads, Reply, Request, Round, Status,
    TensorChange, TensorState, TensorStatus, Traces, Waiting,
};
use sidecar_core::reload::{Cause, FileReport, Outcome, Report, Trigger};
use sidecar_core::text;

use crate::control::clients::{Answer, is_connected};
use crate::control::{clients, metrics};
use crate::hotswap::overlays::Overlays;
use crate::hotswap::reloader::on_thread;
use crate::hotswap::{placement, reloader};
use crate::masking;
use crate::postfetch;
use crate::program::capability::Effect;
use crate::program::models::{Instance, Model};
use crate::program::{barrier, models, own_cache, sched};
use crate::rounds;
use crate::streaming;
use crate::trace::{counts, routes};

/// Why there is no socket.
static EFFECT: Effect = Effect::of(NoEffect::SOCKET);
/// Returns what was requested and had no effect.
static NO_EFFECT: OnceLock<fn() -> Vec<NoEffect>> = OnceLock::new();

/// Returns that no socket could be made, if that is so.
pub fn no_effect() -> Vec<NoEffect> {
    EFFECT.obstacles()
}

/// Listens at `path`, which the user has named if `is_requested` is true. `no_effect` returns what was requested and had no
/// effect.
pub fn start(path: &Path, is_requested: bool, no_effect: fn() -> Vec<NoEffect>) {
    let _ = NO_EFFECT.set(no_effect);
    match clients::start(path, reply) {
        Ok(()) => drop(rounds::drive()),
        Err(error) if !is_requested => {
            log::warn!("there is no control socket {}: {error}", text::path(path))
        }
        Err(error) => {
            let sentence = format!(
                "--socket (LLAMA_SIDECAR_CONTROL): cannot create the control socket {}: {error}; choose another path, for several processes one with %p, which stands for the process id",
                text::path(path)
            );
            EFFECT.log_obstacle(sentence);
        }
    }
}

/// Carries out a request of a client.
fn reply(line: &[u8], client: &UnixStream) -> Answer {
    let request = request(line);
    let ends = request == Ok(Request::RoundEnd);
    match request.and_then(|request| answer(request, client)) {
        Ok(reply) => Answer {
            reply,
            closes: false,
            // Not before the reply is written: the process ends next.
            then: ends.then_some(rounds::end),
        },
        Err(text) => Answer::refused(text),
    }
}

fn request(line: &[u8]) -> Result<Request, String> {
    serde_json::from_slice(line).map_err(|error| {
        format!(
            "not a request: {error}; send a JSON object such as {{\"cmd\":\"status\"}} on one line"
        )
    })
}

fn answer(request: Request, client: &UnixStream) -> Result<Value, String> {
    Ok(match request {
        Request::Ping => json!(Reply::done()),
        Request::Status => json!(status()),
        Request::Reload => json!(on_thread(|| {
            with_each_model(|model| reloader::reload(model, Trigger::Command))
        })),
        Request::Revert => json!(revert()?),
        Request::Unfreeze => {
            reloader::unfreeze();
            json!(Reply::done())
        }
        Request::Swap { revert, overlays } => {
            match on_thread(move || swap(revert.as_deref(), &overlays)) {
                Ok(reloads) => json!(reloads),
                Err(reason) => json!(Reply::refused(reason)),
            }
        }
        Request::Mask { masks, clear } => {
            masking::set(&models::loaded()?, &masks, clear)?;
            json!(Reply::done())
        }
        Request::Prefer { margin } => {
            streaming::set_margin(margin)?;
            json!(Reply::done())
        }
        Request::Hash => json!(hashes(client)),
        Request::Metrics => json!(Metrics {
            ok: true,
            text: metrics::text(),
        }),
        Request::Trace if !Config::get().traces() => {
            return Err(
                "experts are not counted: start the program with --expert-trace-stats (LLAMA_EXPERT_TRACE_STATS=1)".into(),
            );
        }
        Request::Trace => json!(Traces {
            ok: true,
            traces: counts::as_json(),
        }),
        Request::TraceReset => {
            counts::reset();
            json!(Reply::done())
        }
        Request::Mark { text } => {
            routes::mark(&text)?;
            json!(Reply::done())
        }
        Request::Round { start } => json!(round(start, client)?),
        Request::RoundEnd => {
            rounds::exist()?;
            json!(Reply::done())
        }
    })
}

/// Waits for the end of a round, which it starts if `start` is true, as long as the client is
/// connected.
fn round(start: bool, client: &UnixStream) -> Result<Round, String> {
    let ended = match start {
        true => rounds::evaluate(|| is_connected(client)),
        false => rounds::wait(|| is_connected(client)),
    }?;
    Ok(Round {
        ok: true,
        error: None,
        round: ended.round,
        exit: ended.exit,
        state: ended.phase.name().into(),
    })
}

fn status() -> Status {
    let pauses = barrier::pauses();
    Status {
        ok: true,
        version: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        evaluations: sched::count(),
        generation: barrier::generation(),
        graphs_renewed: sched::rebuilt(),
        pauses: pauses.count,
        longest_pause_us: pauses.longest_us(),
        frozen: reloader::is_frozen(),
        waiting: barrier::pending().map(|(obstacle, since)| Waiting {
            obstacle: obstacle.map(|obstacle| obstacle.name().into()),
            seconds: since.as_secs_f64(),
        }),
        post_fetch: postfetch::is_used().then(postfetch::figures),
        own_expert_cache: own_cache::figures(),
        failures: reloader::counts()
            .failures()
            .filter(|(_, count)| *count > 0)
            .map(|(cause, count)| (cause.name().into(), count))
            .collect(),
        no_effect: NO_EFFECT.get().map_or_else(Vec::new, |find| find()),
        margin: Config::get().preference(),
        no_model: models::loaded().err(),
        models: models::models().iter().map(model_status).collect(),
    }
}

fn model_status(model: &Arc<Model>) -> ModelStatus {
    let paths = model
        .files
        .iter()
        .map(|file| text::path(file.gguf.source.path()));
    let known = model.engine.changed();
    let mut changed = Vec::new();
    for (index, tensor) in model.tensors.iter().enumerate() {
        let instances = tensor
            .instances
            .iter()
            .filter(|instance| !instance.is_copy());
        let states: Vec<_> = instances.map(|instance| state(model, instance)).collect();
        if states.iter().all(|&state| state == TensorState::OnOriginal) {
            continue;
        }
        let found = known.iter().find(|change| change.tensor == index);
        changed.push(TensorStatus {
            name: model.name(index).to_string_lossy().into_owned(),
            states,
            old_type: found
                .map_or("", |change| change.original_type.name())
                .into(),
            new_type: found.map_or("", |change| change.ty.name()).into(),
            from: found
                .and_then(|change| change.overlay.as_ref())
                .map(|(from, _)| text::path(&from.path)),
        });
    }
    let instances = model.tensors.iter().flat_map(|tensor| &tensor.instances);
    let overlays = known.iter().filter_map(|change| {
        let (from, hash) = change.overlay.as_ref()?;
        Some(Overlay {
            tensor: model.name(change.tensor).to_string_lossy().into_owned(),
            from: text::path(&from.path),
            named: None,
            as_type: from.as_type.clone(),
            imatrix: from.imatrix.clone(),
            hash: hash.map(|hash| format!("{hash:032x}")),
        })
    });
    ModelStatus {
        model: model.number,
        files: paths.collect(),
        tensors: model.tensors.len(),
        instances: instances.filter(|instance| !instance.is_copy()).count(),
        on_original: model.tensors.len() - changed.len(),
        changed,
        overlays: overlays.collect(),
        loaded_bytes: model.loaded_by_type(),
        private_bytes: model.private_bytes(),
        kept_bytes: model.pool.bytes(),
        blocked: model.blocked.lock().clone().map(|blocked| Blocked {
            cause: blocked.cause.name().into(),
            error: blocked.error,
            seconds: blocked.since.elapsed().as_secs_f64(),
            attempts: blocked.attempts,
        }),
        noted: model.engine.noted_files().iter().map(file_status).collect(),
        content_hash: (!model.is_replaced)
            .then(|| model.engine.content_hash(false))
            .flatten()
            .map(|hash| format!("{hash:032x}")),
        masks: masking::of_model(model),
        stream: streaming::figures(model),
        obstacle: Config::get().hotswap.then(|| model.obstacle()).flatten(),
        uncounted: counts::uncounted(model),
        hotswaps: model.own_hotswap.map(|own| own.sentence().into()),
        differs: {
            let mut files = model.files.iter();
            files.any(|file| !file.trusted().is_at(file.gguf.source.path()))
        },
    }
}

/// Returns a content hash of each model. Reads a model that was never swapped as a whole, as long
/// as the client is connected.
fn hashes(client: &UnixStream) -> Hashes {
    let models = models::models().into_iter().map(|model| {
        let hash = reloader::read_content_hash(&model, || is_connected(client));
        ModelHash {
            model: model.number,
            content_hash: hash.map(|hash| format!("{hash:032x}")),
        }
    });
    Hashes {
        ok: true,
        models: models.collect(),
    }
}

/// Returns the state of one instance.
fn state(model: &Model, instance: &Instance) -> TensorState {
    let private = instance.private.lock();
    let Some(buffer) = private.as_ref() else {
        return TensorState::OnOriginal;
    };
    match buffer.is_host() && placement::device_buffer_type(model, instance).is_some() {
        true => TensorState::FallbackCpu,
        false => TensorState::Detached,
    }
}

/// Removes all masks, returns all tensors to their originals, and freezes reloads. Without hot-swap, masks are all that
/// there is.
fn revert() -> Result<Reloads, String> {
    let config = Config::get();
    let unmasked = masking::clear()?;
    if config.expert_masks && !config.hotswap {
        return Ok(Reloads {
            ok: true,
            unmasked,
            ..Reloads::default()
        });
    }
    reloader::freeze();
    let mut reloads = on_thread(|| with_each_model(reloader::revert));
    reloads.unmasked = unmasked;
    Ok(reloads)
}

/// Reverts overlays of all models, and sets others.
fn swap(revert: Option<&str>, overlays: &[Overlay]) -> Result<Reloads, String> {
    let overlays = Overlays::find(&models::loaded()?, revert, overlays)?;
    Ok(with_each_model(|model| {
        let (revert, set) = overlays.of(model);
        reloader::swap(model, revert, &set)
    }))
}

/// Reloads, reverts or swaps all models, one after the other.
fn with_each_model(work: impl Fn(&Arc<Model>) -> Result<Report, Error>) -> Reloads {
    let mut reports = Vec::new();
    let mut ok = true;
    for model in models::models() {
        reports.push(match work(&model) {
            Ok(report) => {
                let all_used = report.files.iter().all(|file| file.ignored.is_none());
                ok &= report.failure.is_none() && all_used;
                ModelReload::Done(reload_report(&model, &report))
            }
            Err(error) => {
                ok = false;
                ModelReload::Failed {
                    model: model.number,
                    error: error.to_string(),
                }
            }
        });
    }
    Reloads {
        ok,
        reports,
        unmasked: 0,
    }
}

fn file_status(file: &FileReport) -> FileStatus {
    FileStatus {
        path: text::path(&file.path),
        event: match file.ignored {
            None => FileEvent::Taken,
            Some(_) => FileEvent::Ignored,
        },
        cause: file
            .ignored
            .as_ref()
            .map(|ignored| ignored.cause.name().into()),
        reason: file.reason().into(),
    }
}

fn reload_report(model: &Model, report: &Report) -> ReloadReport {
    let count = |outcome| report.count(outcome);
    // The reason of a file of another model is that of its tensors, of which there can be thousands.
    let others = report.files.iter().filter(|file| {
        let ignored = file.ignored.as_ref();
        ignored.is_some_and(|ignored| ignored.cause == Cause::OtherModel)
    });
    let others: HashSet<usize> = others.map(|file| file.file).collect();
    let changed = report.tensors.iter().filter(|tensor| {
        let of_other = tensor.outcome == Outcome::Refused && others.contains(&tensor.file);
        tensor.outcome != Outcome::Unchanged && !of_other
    });
    let tensors = changed.map(|tensor| TensorChange {
        name: tensor.name.to_string_lossy().into_owned(),
        outcome: format!("{:?}", tensor.outcome).to_lowercase(),
        old_type: tensor.old_type.name().into(),
        new_type: tensor.new_type.name().into(),
        bytes: tensor.nbytes,
        place: tensor.placement.clone(),
        reason: tensor.reason.clone(),
    });
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    ReloadReport {
        model: model.number,
        swapped: count(Outcome::Swapped),
        returned: count(Outcome::Returned),
        unchanged: count(Outcome::Unchanged),
        in_place: count(Outcome::InPlace),
        refused: count(Outcome::Refused),
        generation: report.generation,
        failure: report.failure.clone(),
        ms: Milliseconds {
            detect: ms(report.times.detect),
            compare: ms(report.times.compare),
            stage: ms(report.times.stage),
            wait: ms(report.times.wait),
            switch: ms(report.times.switch),
            total: ms(report.times.total),
        },
        files: report.files.iter().map(file_status).collect(),
        tensors: tensors.collect(),
    }
}
