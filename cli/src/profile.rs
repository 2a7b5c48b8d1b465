//! Profiles: the overlays and masks of a running program, in a file for the next start.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use regex::Regex;
use sidecar_core::files;
use sidecar_core::gguf::{Access, GgufFile, NamePattern, open_model};
use sidecar_core::protocol::{ModelStatus, Overlay, Profile, Request, Status};
use sidecar_core::reload::check_tensor;
use sidecar_core::{signals, text};

use crate::control::{self, Control};
use crate::launch::executable::Executable;
use crate::launch::run::RunOptions;
use crate::output::Outputs;
use crate::temporary::{self, Temporary};
use crate::tune;
use crate::words::quoted;

/// What profiles start with.
const START: &str = "{\"llama_sidecar\":\"profile\"";

/// `status --save`: writes what is set on the model of a running program.
pub fn save(at: &Control, path: &Path, outputs: Outputs) -> Result<()> {
    outputs.check(path, START)?;
    let answer = control::ask(&at.socket()?, &Request::Status, at.limit)?;
    control::done(&answer)?;
    let profile = of_program(control::parsed(&answer)?)?;
    let (overlays, masks) = (profile.overlays.len(), profile.masks.len());
    let json = serde_json::to_string_pretty(&profile)? + "\n";
    outputs.write(path, &json)?;
    println!(
        "{overlays} overlays and the masks of {masks} layers are in {}; set them at each start with: llama-sidecar run --profile {} -- COMMAND",
        text::path(path),
        quoted(path.as_os_str())
    );
    Ok(())
}

fn of_program(status: Status) -> Result<Profile> {
    let is_changed = |of: &ModelStatus| !(of.overlays.is_empty() && of.masks.is_empty());
    let mut changed = status.models.into_iter().filter(is_changed);
    let model = changed
        .next()
        .context("nothing to save: no tensor has an overlay, and no expert is masked")?;
    ensure!(
        changed.next().is_none(),
        "several models have overlays or masks, and a profile is of one model: 'undo' those of the others"
    );
    let overlays = model.overlays.into_iter().map(|overlay| {
        let source = text::path_of(&overlay.from);
        ensure!(
            source.exists(),
            "{}, which tensor '{}' is from, is gone: a later start needs it",
            text::path(&source),
            overlay.tensor
        );
        Ok(Overlay {
            tensor: regex::escape(&overlay.tensor),
            ..overlay
        })
    });
    Ok(Profile {
        llama_sidecar: Profile::KIND.into(),
        files: model.files,
        overlays: overlays.collect::<Result<_>>()?,
        masks: model.masks,
    })
}

/// Lets `run` use its profile. Tensors that are to be quantised are in the folder that is returned, which the program needs
/// as long as it loads models.
pub fn prepare(options: &mut RunOptions) -> Result<Option<Temporary>> {
    let Some(path) = options.profile() else {
        return Ok(None);
    };
    let path = path
        .canonicalize()
        .with_context(|| format!("cannot find {}", text::path(path)))?;
    let content = files::read_text(&path);
    let content = content.with_context(|| format!("cannot read {}", text::path(&path)))?;
    let mut profile = Profile::parse(&content).map_err(|why| {
        anyhow!(
            "{} is no profile of 'status --save': {why}",
            text::path(&path)
        )
    })?;
    let (overlays, masks) = (!profile.overlays.is_empty(), !profile.masks.is_empty());
    if !overlays && !masks {
        bail!("{} has no overlay and no mask", text::path(&path));
    }
    if options.is_dry() || profile.overlays.iter().all(|of| of.as_type.is_none()) {
        check(&profile.overlays).with_context(|| explain(&path))?;
        options.use_profile(&path, overlays, masks);
        return Ok(None);
    }
    let folder = Temporary::new().context(temporary::NOT_CREATED)?;
    let made = folder.path().join("profile.json");
    // A limit of file sizes is an error with its reason.
    signals::without_write_signals(|| {
        quantize(&mut profile, options.program_word(), folder.path())
            .and_then(|()| check(&profile.overlays))
            .with_context(|| explain(&path))?;
        Outputs::default().write(&made, &serde_json::to_string(&profile)?)
    })?;
    options.use_profile(&made, overlays, masks);
    Ok(Some(folder))
}

fn explain(path: &Path) -> String {
    format!(
        "the program was not started: the profile {} cannot be used",
        text::path(path)
    )
}

/// Fails unless each tensor has the bytes that it was saved with: a program that has started would go on without the profile.
/// Those that are to be quantised are not read.
fn check(overlays: &[Overlay]) -> Result<()> {
    let mut opened: BTreeMap<&str, Vec<GgufFile>> = BTreeMap::new();
    for overlay in overlays {
        let is_ready = overlay.as_type.is_none() || overlay.named.is_some();
        let Some(hash) = overlay.hash.as_deref().filter(|_| is_ready) else {
            continue;
        };
        if !opened.contains_key(overlay.from.as_str()) {
            let files = open_model(&text::path_of(&overlay.from), Access::Read)?;
            opened.insert(&overlay.from, files);
        }
        let pattern = NamePattern::parse(&overlay.tensor).map_err(anyhow::Error::msg)?;
        for file in &opened[overlay.from.as_str()] {
            let tensors = file.header.tensors.iter();
            for info in tensors.filter(|info| pattern.matches(file.header.name(info))) {
                let found = format!("{:032x}", check_tensor(file, info, None)?.hash);
                ensure!(
                    found == hash,
                    "tensor '{}' of {} has other bytes than when the profile was saved: restore the file, the importance matrix or the ggml library that quantises, or save the profile again",
                    file.header.name(info).to_string_lossy(),
                    overlay.named.as_deref().unwrap_or(&overlay.from)
                );
            }
        }
    }
    Ok(())
}

/// Quantises the tensors of overlays that need it, as `swap --live --as` did, into a folder.
fn quantize(profile: &mut Profile, program: &OsStr, folder: &Path) -> Result<()> {
    let library = library(program)?;
    let open = |path: &String| GgufFile::open(&text::path_of(path), Access::Read).ok();
    let in_use: Vec<GgufFile> = profile.files.iter().filter_map(open).collect();
    let mut together: BTreeMap<_, Vec<&mut Overlay>> = BTreeMap::new();
    for overlay in &mut profile.overlays {
        if let Some(ty) = overlay.as_type.clone() {
            let from = (overlay.from.clone(), ty, overlay.imatrix.clone());
            together.entry(from).or_default().push(overlay);
        }
    }
    for (number, ((from, ty, imatrix), overlays)) in together.into_iter().enumerate() {
        let names: Vec<&str> = overlays.iter().map(|of| of.tensor.as_str()).collect();
        let folder = folder.join(number.to_string());
        std::fs::create_dir(&folder).with_context(|| text::path(&folder))?;
        let (source, imatrix) = (text::path_of(&from), imatrix.map(|of| text::path_of(&of)));
        let only = Regex::new(&names.join("|"))?;
        let made = tune::quantize(
            &source,
            &only,
            &ty,
            imatrix.as_deref(),
            &library,
            &in_use,
            &folder,
        )?;
        for overlay in overlays {
            overlay.from = text::path(&made.path);
            overlay.named = Some(from.clone());
        }
    }
    Ok(())
}

/// Returns the ggml library that quantises: that of the program, else of llama-quantize.
fn library(program: &OsStr) -> Result<PathBuf> {
    let of = |word: &OsStr| tune::ggml_library(Executable::find(word).ok()?.libraries().ok()?);
    of(program).or_else(|| of("llama-quantize".as_ref())).context(
        "the profile has tensors that are quantised, and neither the program nor a llama-quantize in PATH is linked to a libggml-base.so: add the folder of llama-quantize to PATH",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use sidecar_core::protocol::LayerMask;

    fn model(from: &str) -> ModelStatus {
        ModelStatus {
            overlays: vec![Overlay {
                tensor: "blk.1.a".into(),
                from: from.into(),
                hash: Some("0".repeat(32)),
                ..Overlay::default()
            }],
            masks: vec![LayerMask::default()],
            ..ModelStatus::default()
        }
    }

    fn of(models: Vec<ModelStatus>) -> Result<Profile> {
        of_program(Status {
            models,
            ..Status::default()
        })
    }

    #[test]
    fn a_profile_has_what_one_model_has() {
        let profile = of(vec![ModelStatus::default(), model("/dev/null")]).expect("a profile");
        assert_eq!(profile.overlays[0].tensor, "blk\\.1\\.a");
        assert_eq!((profile.overlays.len(), profile.masks.len()), (1, 1));
        let json = serde_json::to_string_pretty(&profile).expect("JSON");
        assert_eq!(files::kind_of(json.as_bytes()).as_deref(), Some(START));
        assert_eq!(Profile::parse(&json), Ok(profile));
        let refused = |models| of(models).expect_err("no profile").to_string();
        assert!(refused(vec![ModelStatus::default()]).contains("nothing to save"));
        assert!(refused(vec![model("/dev/null"), model("/dev/null")]).contains("several models"));
        assert!(refused(vec![model("/nowhere")]).contains("is gone"));
    }

    #[test]
    fn what_is_no_profile_is_refused() {
        for text in [
            "",
            "{}",
            "[]",
            "{\"llama_sidecar\":\"measured\"}",
            "{\"llama_sidecar\":\"profile\",\"overlay\":[]}",
        ] {
            assert!(Profile::parse(text).is_err(), "{text}");
        }
    }
}
