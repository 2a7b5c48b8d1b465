//! Expert streaming: experts of a model that is larger than memory are read from disk as soon
//! as their layer is routed.

use std::sync::Arc;

use llama_sidecar::config::{Config, ExpertStream};
use llama_sidecar::protocol::{Event, StreamFigures};
use llama_sidecar::stream::{Reader, Settings};
use parking_lot::RwLock;

use crate::capability::Capability;
use crate::models::Model;
use crate::routing::Routed;
use crate::{journal, load};

/// Expert streaming, as a capability.
pub struct Streaming;

/// The reader of a model.
struct Stream {
    /// The number of the model.
    model: u64,
    reader: Reader,
}

/// The readers of models that the program has.
static STREAMS: RwLock<Vec<Stream>> = RwLock::new(Vec::new());

impl Capability for Streaming {
    fn is_enabled(&self) -> bool {
        Config::get().expert_stream.streams()
    }

    fn uses_routing(&self) -> bool {
        self.is_enabled()
    }

    fn model_complete(&self, model: &Arc<Model>) {
        if self.is_enabled() {
            start(model);
        }
    }

    fn model_freed(&self, model: &Model) {
        let stream = {
            let mut streams = STREAMS.write();
            let at = streams
                .iter()
                .position(|stream| stream.model == model.number);
            at.map(|at| streams.remove(at))
        };
        if let Some(stream) = stream {
            note(model.number, &stream.reader.counts());
        }
    }

    fn routed(&self, routed: &Routed<'_>) {
        let streams = STREAMS.read();
        let of_model = |stream: &&Stream| stream.model == routed.model.number;
        if let Some(stream) = streams.iter().find(of_model)
            && let Some(layer) = stream.reader.position(routed.layer)
        {
            let reader = &stream.reader;
            reader.schedule(layer, routed.mapped, &routed.ids, routed.hidden);
        }
    }

    fn finish(&self) {
        // The process ends: a thread that holds the lock may never release it.
        let Some(streams) = STREAMS.try_read() else {
            return;
        };
        for stream in streams.iter() {
            note(stream.model, &stream.reader.counts());
        }
    }
}

/// Makes a reader for a model whose experts are in the mapping of its files.
fn start(model: &Arc<Model>) {
    if !load::finish(model) {
        return;
    }
    let path = model.files[0].gguf.source.path().display();
    let config = Config::get();
    let settings = Settings {
        always: config.expert_stream == ExpertStream::On,
        predict: config.expert_stream_predict,
        threads: Settings::default_threads(),
    };
    let files: Vec<_> = model.files.iter().map(|file| &file.gguf).collect();
    match Reader::new(&files, settings) {
        Ok(reader) => {
            log::info!("streaming the routed experts of {path}");
            STREAMS.write().push(Stream {
                model: model.number,
                reader,
            });
        }
        Err(error) => log::warn!(
            "{path}: cannot stream its experts: {error}; the program reads them as without streaming"
        ),
    }
}

/// Returns the figures of a model, if its experts are streamed.
pub fn figures(model: &Model) -> Option<StreamFigures> {
    let streams = STREAMS.read();
    let stream = streams.iter().find(|stream| stream.model == model.number)?;
    Some(stream.reader.counts())
}

/// Notes the figures of a model in the journal.
fn note(model: u64, figures: &StreamFigures) {
    journal::note(|| Event::Stream {
        model,
        figures: *figures,
    });
}
