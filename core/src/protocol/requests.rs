//! Requests to the drop-in.

use serde::{Deserialize, Serialize};

/// A request to the drop-in.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub enum Request {
    /// Checks that a drop-in listens.
    Ping,
    /// Requests models, files, changed tensors and counters.
    Status,
    /// Reloads changed files.
    Reload,
    /// Returns all tensors to their originals and freezes reloads.
    Revert,
    /// Permits reloads after [`Request::Revert`].
    Unfreeze,
    /// Reverts overlays and sets others, in one switch of each model.
    Swap {
        /// A regular expression for whole names: overlays of these tensors are reverted, unless
        /// they are set.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        revert: Option<String>,
        /// Overlays to set. The last one that names a tensor counts.
        #[serde(default)]
        overlays: Vec<Overlay>,
    },
    /// Masks experts: they are never chosen.
    Mask {
        /// Layers, each with the experts that are masked in place of those before.
        #[serde(default)]
        masks: Vec<LayerMask>,
        /// Whether layers that are not named have no mask any more.
        #[serde(default)]
        clear: bool,
    },
    /// Sets the margin within which experts in memory are preferred.
    Prefer {
        /// The largest difference of scores, 0 to 1.
        margin: f32,
    },
    /// Requests a content hash of each model.
    Hash,
    /// Requests metrics in the text format of Prometheus.
    Metrics,
    /// Requests the expert counts of each model.
    Trace,
    /// Sets the expert counts to zero.
    TraceReset,
    /// Notes a text at the current position of the routes.
    Mark {
        /// The text.
        text: String,
    },
    /// Waits for the end of a round of evaluations.
    Round {
        /// Whether a new round is started; else the current one is waited for.
        #[serde(default)]
        start: bool,
    },
    /// Lets a program with rounds end.
    RoundEnd,
}

/// Experts of a layer that are never chosen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMask {
    /// Number of the layer.
    pub layer: u32,
    /// Numbers of the experts.
    pub experts: Vec<u32>,
}

/// Tensors that take type and bytes from another file than the model's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// In a request a regular expression for whole names of tensors, in [`Status`] a name.
    pub tensor: String,
    /// Absolute path of a GGUF file, or of any shard of a model.
    pub from: String,
    /// In a request, the path that [`Status`] has in place of `from`, if that is a temporary file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<String>,
    /// The type that tensors of the file were quantised to, if they were. A request then has `named`.
    #[serde(default, rename = "as", skip_serializing_if = "Option::is_none")]
    pub as_type: Option<String>,
    /// Path of the importance matrix that they were quantised with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imatrix: Option<String>,
    /// Hash of the bytes of each tensor, in 32 hexadecimal digits. A request whose tensors have other bytes is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
}

/// What is set on each model before its first evaluation: a file, from `status --save` for `run --profile`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`Profile::KIND`].
    pub llama_sidecar: String,
    /// Paths of the files of the model.
    #[serde(default)]
    pub files: Vec<String>,
    /// As in a request. One with `as` and without `named` is to be quantised first.
    #[serde(default)]
    pub overlays: Vec<Overlay>,
    /// Experts that are masked.
    #[serde(default)]
    pub masks: Vec<LayerMask>,
}

impl Profile {
    /// What the file is.
    pub const KIND: &str = "profile";

    /// Reads a profile.
    pub fn parse(text: &str) -> Result<Profile, String> {
        let profile: Profile = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match profile.llama_sidecar == Profile::KIND {
            true => Ok(profile),
            false => Err(format!("expected \"llama_sidecar\": \"{}\"", Profile::KIND)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{from_str, json, to_value};

    #[test]
    fn requests_have_the_names_of_the_commands() {
        for (name, request) in [
            ("ping", Request::Ping),
            ("status", Request::Status),
            ("reload", Request::Reload),
            ("revert", Request::Revert),
            ("unfreeze", Request::Unfreeze),
            ("hash", Request::Hash),
            ("metrics", Request::Metrics),
            ("trace", Request::Trace),
            ("trace-reset", Request::TraceReset),
            ("round-end", Request::RoundEnd),
        ] {
            let json = json!({"cmd": name});
            assert_eq!(to_value(&request).expect("JSON"), json);
            let with_more = json!({"id": 7, "cmd": name}).to_string();
            assert_eq!(from_str::<Request>(&with_more).expect(name), request);
        }
        let mark = Request::Mark {
            text: "next".into(),
        };
        let overlay = Overlay {
            tensor: "output".into(),
            from: "/other.gguf".into(),
            ..Overlay::default()
        };
        let swap = |revert: Option<&str>, overlays: &[Overlay]| Request::Swap {
            revert: revert.map(str::to_owned),
            overlays: overlays.to_vec(),
        };
        let set = json!([{"tensor": "output", "from": "/other.gguf"}]);
        for (request, json) in [
            (mark, json!({"cmd": "mark", "text": "next"})),
            (
                Request::Prefer { margin: 0.25 },
                json!({"cmd": "prefer", "margin": 0.25}),
            ),
            (
                swap(None, &[overlay]),
                json!({"cmd": "swap", "overlays": set}),
            ),
            (
                swap(Some(".*"), &[]),
                json!({"cmd": "swap", "revert": ".*", "overlays": []}),
            ),
        ] {
            assert_eq!(to_value(&request).expect("JSON"), json);
            let read = from_str::<Request>(&json.to_string());
            assert_eq!(read.expect("a request"), request);
        }
        for (start, text) in [
            (false, "{\"cmd\":\"round\"}"),
            (true, "{\"cmd\":\"round\",\"start\":true}"),
        ] {
            assert_eq!(
                from_str::<Request>(text).expect("round"),
                Request::Round { start }
            );
        }
        for bad in [
            "{}",
            "{\"cmd\":\"swap\",\"overlays\":[{}]}",
            "{\"cmd\":\"mark\"}",
            "[]",
            "\"status\"",
            "{\"cmd\":\"stop\"}",
            "{\"cmd\":1}",
        ] {
            assert!(from_str::<Request>(bad).is_err(), "{bad}");
        }
    }
}
