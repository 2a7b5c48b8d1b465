//! `llama-sidecar undo`: what was changed in a running program or in a model's files is returned.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use regex::Regex;
use serde_json::json;
use sidecar_core::gguf::NamePattern;
use sidecar_core::protocol::{ModelStatus, Request, Status};
use sidecar_core::text;

use crate::control::{self, Control, server};
use crate::print::stdout;
use crate::swap;
use crate::words::quoted;

/// What is undone.
#[derive(clap::Args)]
pub struct UndoOptions {
    /// A model that 'swap' changed: its original tensors are put back. With -s, the program reloads them.
    model: Option<PathBuf>,
    /// Only tensors whose whole name matches this regular expression.
    #[arg(long, value_name = "REGEX")]
    tensor: Option<Regex>,
    /// Print what would be returned, and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    at: Control,
}

/// A change that is undone: what it is, and the request for it.
struct Step {
    what: String,
    request: Request,
}

/// Puts the originals of a model's files back, or ends the changes of a running program.
pub fn run(options: &UndoOptions) -> Result<()> {
    let Some(model) = &options.model else {
        return of_program(options);
    };
    if options.at.json && options.at.socket.is_none() {
        bail!("--json prints the reply of a program: also pass its socket with -s");
    }
    swap::restore(model, options.tensor.as_ref(), options.dry_run)?;
    // Without a change, the program may use the version before, or an earlier 'undo' may have frozen its reloads.
    if options.at.socket.is_none() || options.dry_run {
        return Ok(());
    }
    let socket = options.at.socket()?;
    let answer = control::ask(&socket, &Request::Status, options.at.limit)?;
    if control::parsed::<Status>(&answer)?.frozen {
        let reply = control::ask(&socket, &Request::Unfreeze, options.at.limit)?;
        control::done(&reply)?;
    }
    control::reload(&options.at, &server::ServerOptions::default())?;
    if !options.at.json {
        println!("{}", control::CACHED);
    }
    Ok(())
}

fn of_program(options: &UndoOptions) -> Result<()> {
    let socket = options.at.socket()?;
    let mut answer = control::ask(&socket, &Request::Status, options.at.limit)?;
    control::done(&answer)?;
    text::one_line(&mut answer);
    let status: Status = control::parsed(&answer)?;
    let is_meant = meant(options.tensor.as_ref())?;
    let steps = steps(&status, options.tensor.as_ref(), &is_meant);
    let mut undone = Vec::new();
    let mut failed = Ok(());
    for Step { what, request } in &steps {
        if options.dry_run {
            match options.at.json {
                true => undone.push(json!({"what": what})),
                false => println!("dry run: would return to this: {what}"),
            }
            continue;
        }
        // The other steps are done even if this one fails.
        let reply = control::ask(&socket, request, options.at.limit)?;
        let done = match options.at.json {
            true => {
                undone.push(json!({"what": what, "reply": reply}));
                control::done(&reply)
            }
            false => control::print_reply(&socket, request, reply),
        };
        match done {
            Ok(()) if options.at.json => {}
            Ok(()) => println!("done: {what}"),
            Err(error) => failed = failed.and(Err(error.context(format!("not undone: {what}")))),
        }
    }
    if options.at.json {
        let (ok, dry_run) = (failed.is_ok(), options.dry_run);
        let answer = json!({"ok": ok, "dry_run": dry_run, "undone": undone});
        writeln!(stdout(), "{answer:#}")?;
        return failed;
    }
    let next = frozen(&status, &steps, &socket);
    if steps.is_empty() && next.is_none() {
        let nothing = nothing(&status, options.tensor.as_ref(), is_meant, &socket);
        println!("{nothing}");
    }
    if let Some(next) = next {
        println!("{next}");
    }
    if !options.dry_run && steps.iter().any(|of| of.request != Request::Unfreeze) {
        println!("{}", control::CACHED);
    }
    failed
}

/// Returns the changes of a program, in the order in which they are undone.
fn steps(status: &Status, tensor: Option<&Regex>, is_meant: impl Fn(&str) -> bool) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut add = |what: String, request| steps.push(Step { what, request });
    let count = |of: &dyn Fn(&ModelStatus) -> usize| status.models.iter().map(of).sum::<usize>();
    let overlaid = count(&|model| {
        let names = model.overlays.iter().map(|of| of.tensor.as_str());
        names.filter(|name| is_meant(name)).count()
    });
    let of_files = count(&|model| model.changed.iter().filter(|of| of.from.is_none()).count());
    let masked = count(&|model| model.masks.len());
    if tensor.is_none() && of_files > 0 {
        // It also ends overlays and masks.
        let what = format!(
            "{} tensors are those that the program loaded, and reloads are frozen, because a file of the model has others",
            of_files + overlaid
        );
        add(what, Request::Revert);
    } else {
        if overlaid > 0 {
            let revert = tensor.map_or(".*", Regex::as_str).to_owned();
            let overlays = Vec::new();
            let request = Request::Swap {
                revert: Some(revert),
                overlays,
            };
            add(
                format!("{overlaid} tensors are those of the program's own file"),
                request,
            );
        }
        if tensor.is_none() && masked > 0 {
            let (masks, clear) = (Vec::new(), true);
            add(
                format!("no expert of {masked} layers is masked"),
                Request::Mask { masks, clear },
            );
        }
        if tensor.is_none() && status.frozen && !status.models.iter().any(|of| of.differs) {
            add("reloads are permitted".into(), Request::Unfreeze);
        }
    }
    if let Some(margin) = status.margin.filter(|_| tensor.is_none()) {
        let streams = status
            .models
            .iter()
            .filter_map(|model| model.stream.as_ref());
        if streams.clone().any(|of| of.margin != margin) {
            let what = format!("experts in memory are preferred within {margin}, as at the start");
            add(what, Request::Prefer { margin });
        }
    }
    steps
}

/// Returns whether a tensor of a name is to be undone.
fn meant(tensor: Option<&Regex>) -> Result<impl Fn(&str) -> bool> {
    let pattern = tensor.map(|tensor| NamePattern::parse(tensor.as_str()));
    let pattern = pattern.transpose().map_err(anyhow::Error::msg)?;
    Ok(move |name: &str| {
        let name = std::ffi::CString::new(name).unwrap_or_default();
        pattern
            .as_ref()
            .is_none_or(|pattern| pattern.matches(&name))
    })
}

/// Returns why nothing was undone, and the next step.
fn nothing(
    status: &Status,
    tensor: Option<&Regex>,
    is_meant: impl Fn(&str) -> bool,
    socket: &Path,
) -> String {
    let of_file = |model: &&ModelStatus| {
        let mut changed = model.changed.iter().filter(|of| of.from.is_none());
        changed.any(|of| is_meant(&of.name))
    };
    if let Some(model) = status.models.iter().find(of_file) {
        let file = model.files.first().map(|file| quoted(file.as_ref()));
        return format!(
            "nothing was undone: the tensors are those of a file that changed: return them with: llama-sidecar undo {} --tensor REGEX -s {}",
            file.unwrap_or_default(),
            quoted(socket.as_os_str())
        );
    }
    let which = tensor.map(|of| format!(" of tensors that match '{}'", text::line(of.as_str())));
    let which = which.unwrap_or_default();
    format!(
        "nothing to undo: no swap, mask, margin or freeze{which} is in force; 'llama-sidecar undo MODEL' returns the files of a model"
    )
}

/// Returns the next step where reloads stay frozen.
fn frozen(status: &Status, steps: &[Step], socket: &Path) -> Option<String> {
    let freezes = |of: &Step| of.request == Request::Revert;
    let permits = |of: &Step| of.request == Request::Unfreeze;
    let stays = steps.iter().any(freezes) || status.frozen && !steps.iter().any(permits);
    let model = status.models.iter().find(|of| of.differs)?;
    let file = quoted(model.files.first()?.as_ref());
    let socket = quoted(socket.as_os_str());
    stays.then(|| {
        format!("reloads are frozen after 'undo': a file of the model is another one than at the start. If 'swap' changed it, return it and reload: llama-sidecar undo {file} -s {socket}\nto use files as they are: llama-sidecar ctl unfreeze")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecar_core::protocol::{LayerMask, Overlay, StreamFigures, TensorStatus};

    fn requests(status: &Status, tensor: Option<&str>) -> Vec<Request> {
        let tensor = tensor.map(|text| Regex::new(text).expect("an expression"));
        let is_meant = meant(tensor.as_ref()).expect("an expression");
        let steps = steps(status, tensor.as_ref(), is_meant);
        steps.into_iter().map(|step| step.request).collect()
    }

    fn of(model: ModelStatus) -> Status {
        Status {
            models: vec![model],
            ..Status::default()
        }
    }

    fn swap(revert: &str) -> Request {
        Request::Swap {
            revert: Some(revert.into()),
            overlays: Vec::new(),
        }
    }

    fn overlaid() -> ModelStatus {
        ModelStatus {
            overlays: vec![Overlay {
                tensor: "blk.1.a".into(),
                ..Overlay::default()
            }],
            changed: vec![TensorStatus {
                name: "blk.1.a".into(),
                from: Some("/other".into()),
                ..TensorStatus::default()
            }],
            masks: vec![LayerMask::default()],
            ..ModelStatus::default()
        }
    }

    #[test]
    fn each_change_is_undone_by_its_request() {
        let clear = Request::Mask {
            masks: Vec::new(),
            clear: true,
        };
        assert_eq!(requests(&of(ModelStatus::default()), None), []);
        assert_eq!(requests(&of(overlaid()), None), [swap(".*"), clear]);
        assert_eq!(
            requests(&of(overlaid()), Some("blk.1.*")),
            [swap("blk.1.*")]
        );
        assert_eq!(requests(&of(overlaid()), Some("blk.2.*")), []);
        let mut changed = overlaid();
        changed.changed.push(TensorStatus::default());
        assert_eq!(requests(&of(changed), None), [Request::Revert]);
        let stream = StreamFigures {
            margin: 0.5,
            ..StreamFigures::default()
        };
        let mut status = of(ModelStatus {
            stream: Some(stream),
            ..ModelStatus::default()
        });
        status.margin = Some(0.5);
        assert_eq!(requests(&status, None), []);
        status.margin = Some(0.25);
        assert_eq!(requests(&status, None), [Request::Prefer { margin: 0.25 }]);
    }

    #[test]
    fn reloads_stay_frozen_while_a_file_differs() {
        let mut status = of(ModelStatus {
            files: vec!["/m.gguf".into()],
            ..ModelStatus::default()
        });
        status.frozen = true;
        assert_eq!(requests(&status, None), [Request::Unfreeze]);
        assert_eq!(requests(&status, Some(".*")), []);
        status.models[0].differs = true;
        assert_eq!(requests(&status, None), []);
        let next = frozen(&status, &[], Path::new("/s")).expect("a step");
        assert!(
            next.contains("undo /m.gguf -s /s") && next.contains("ctl unfreeze"),
            "{next}"
        );
    }
}
