//! `llama-sidecar tune`: which tensors can be quantised further, and the types of a model for a size.
//!
//! Modules, top to bottom:
//!
//! | module | contents |
//! |---|---|
//! | [`page`] | the results as a page |
//! | [`tables`] | the results as text and JSON |
//! | [`notes`] | what a user must know beside the figures |
//! | [`results`] | what was measured and chosen |
//! | [`write`](mod@write) | a model with other types, as `llama-quantize` writes it |
//! | [`sweep`] | measurements |
//! | [`identity`], [`kept`] | hashes of models; quantised tensors |
//! | [`candidate`], [`groups`], [`mix`] | a type for a tensor; tensors that get a type together; types for all tensors |
//! | [`record`] | the work folder |
//! | [`imatrix`], [`recipe`], [`model`] | importance matrices; the choice of types; the tensors of a model |

mod candidate;
mod groups;
mod identity;
mod imatrix;
mod kept;
mod mix;
mod model;
mod notes;
mod page;
mod recipe;
mod record;
pub mod results;
mod sweep;
mod tables;
mod write;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ggml_quantize::Ggml;
use indicatif::ProgressBar;
use regex::Regex;
use sidecar_core::descriptors::processors;
use sidecar_core::gguf::GgufFile;
use sidecar_core::reload::hash_bytes;
use sidecar_core::text;

use crate::evaluation::base::{self, Base};
use crate::evaluation::program::{EvaluationOptions, Program};
use crate::evaluation::session::check_files;
use crate::help;
use crate::output::{Outputs, beside, check_distinct};
use crate::pruned::Mixture;
use crate::sizes::{size, time};
use candidate::{Candidate, Origin};
use groups::By;
use identity::Identities;
use imatrix::Matrix;
use kept::Quantizer;
use model::{Model, Tensor};
pub use notes::{of_folder, on_interruption};
pub use record::BASE_LOGITS;
use record::{Record, make_folder};
use results::{Goal, Results};
pub use sweep::ggml_library;
use sweep::{Cut, Plan, Sweep};

/// The fewest chunks that are evaluated for `--time`.
const FEWEST: u32 = 4;

/// The model, the candidates, and the goal.
#[derive(clap::Args)]
pub struct TuneOptions {
    /// The model: a GGUF file, or any shard of one. It stays as it is.
    model: PathBuf,
    /// Candidates for the tensors: types such as q4_K, or other files of the same model.
    #[arg(long, value_name = "TYPE", value_delimiter = ',', required = true)]
    types: Vec<String>,
    /// The text to evaluate.
    #[arg(long, value_name = "FILE", required_unless_present_any = ["base", "prepare"])]
    text: Option<PathBuf>,
    /// Base logits that llama-perplexity wrote. Without it, they are made from the text.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    base: Option<PathBuf>,
    /// A better version of the model, for the base logits and as the source of the tensors.
    #[arg(long, value_name = "GGUF")]
    reference: Option<PathBuf>,
    /// An importance matrix of llama-imatrix, for quantising.
    #[arg(long, value_name = "FILE")]
    imatrix: Option<PathBuf>,
    /// Tensors that get a type together.
    #[arg(long, value_enum, default_value = "role")]
    by: By,
    /// A group of tensors whose whole names match; may be repeated. Others stay as they are.
    #[arg(long, value_name = "REGEX", conflicts_with = "by")]
    group: Vec<Regex>,
    /// Only tensors whose whole names match. Others stay as they are.
    #[arg(long, value_name = "REGEX")]
    only: Option<Regex>,
    /// Experts that the model may do without, as 'prune --save' writes them.
    ///
    /// May be repeated. With --size, the lists and the types are chosen together.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["bpw", "prepare"])]
    experts: Vec<PathBuf>,
    /// Choose types so that the file is not larger than this: 5G is 5 GiB, 5GB are 5 x 10^9 bytes.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// Choose types so that the tensors have at most so many bits a weight.
    #[arg(long, value_name = "BITS", conflicts_with = "size")]
    bpw: Option<f64>,
    /// Write the model with the chosen types.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    #[command(flatten)]
    outputs: Outputs,
    /// Quantise the tensors to all types, print the files, and measure nothing.
    #[arg(long, conflicts_with_all = ["size", "bpw", "output"])]
    prepare: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The folder for measurements and quantised tensors.
    ///
    /// The same command continues there after an interruption. Default: MODEL.tune.
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// The libggml-base.so that quantises; that of the program by default.
    #[arg(long, value_name = "LIBRARY", hide_short_help = true)]
    ggml: Option<PathBuf>,
    /// Evaluate as much of the text as fits into this time, for example 1h.
    ///
    /// What is quantised takes time beside it. After an interruption, as much is evaluated as before.
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with_all = ["chunks", "base", "prepare"])]
    time: Option<Duration>,
    #[command(flatten)]
    evaluation: EvaluationOptions,
}

/// Who uses the measurements.
pub trait Caller {
    /// Fails if a new model, which does not have its path yet, is not to be kept.
    fn check(&mut self, results: &Results<'_>, model: &Path) -> Result<()> {
        results.plan.program.try_model(model)
    }

    /// Prints what was measured.
    fn print(&mut self, results: &Results<'_>, folder: &Path);
}

impl Caller for &TuneOptions {
    fn print(&mut self, results: &Results<'_>, folder: &Path) {
        match self.json {
            true => println!("{:#}", tables::json(results)),
            false => print!("{}", tables::text(results, folder, self.output.as_deref())),
        }
    }
}

/// Measures what is not known yet, and prints and writes the results.
pub fn run(mut options: &TuneOptions) -> Result<()> {
    run_for(options, &mut options)
}

/// Measures with these words of a command line after `tune`.
pub fn measure(words: impl IntoIterator<Item = OsString>, caller: &mut dyn Caller) -> Result<()> {
    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        options: TuneOptions,
    }
    let words = std::iter::once("tune".into()).chain(words);
    run_for(&help::parsed::<CommandLine>(words)?.options, caller)
}

fn run_for(options: &TuneOptions, caller: &mut dyn Caller) -> Result<()> {
    let mut begun = None;
    let result = tune(options, caller, &mut begun);
    if let (Err(_), Some(folder)) = (&result, begun) {
        eprintln!("llama-sidecar: {}", notes::of_failure(&folder));
    }
    result
}

/// Does the work of [`run`]. Sets `begun` to the work folder when the first measurement begins.
fn tune(options: &TuneOptions, caller: &mut dyn Caller, begun: &mut Option<PathBuf>) -> Result<()> {
    if let Some(bits) = options.bpw {
        ensure!(
            bits.is_finite() && bits > 0.0,
            "--bpw is {bits}, expected a number of bits such as 4.5"
        );
    }
    let goal = match (options.size, options.bpw) {
        (Some(bytes), _) => Some(Goal::Size(bytes)),
        (None, Some(bits)) => Some(Goal::BitsPerWeight(bits)),
        (None, None) => None,
    };
    ensure!(
        options.output.is_none() || goal.is_some(),
        "-o needs a goal: pass --size or --bpw"
    );
    let model = Model::open(&options.model)?;
    let reference = options.reference.as_deref().map(Model::open).transpose()?;
    let source = reference.as_ref().unwrap_or(&model);
    if let Some(path) = &options.output {
        // Not after the measurements.
        options.outputs.check(path, "GGUF").context("-o")?;
        let read = [&options.text, &options.base, &options.imatrix];
        let read = read.into_iter().flatten().chain(&options.experts);
        check_distinct(&[path], read.map(PathBuf::as_path))?;
    }
    let matrix = options.imatrix.as_deref().map(Matrix::load).transpose()?;
    let candidates = options.types.iter().map(|text| Candidate::parse(text));
    let candidates: Vec<Candidate> = candidates.collect::<Result<_>>()?;
    for (at, of) in candidates.iter().enumerate() {
        ensure!(
            candidates[..at].iter().all(|before| before.name != of.name),
            "--types has '{}' twice: name each candidate once; the name of a file is its name without extension",
            of.name
        );
    }

    let mixture = match options.experts.is_empty() {
        true => None,
        false => Some(Mixture::of(&model.files)?),
    };
    let cuts = mixture.iter().flat_map(|mixture| {
        let read = |path: &PathBuf| Cut::read(path, &model, mixture);
        options.experts.iter().map(read)
    });
    let cuts: Vec<Cut<'_>> = cuts.collect::<Result<_>>()?;
    for (at, of) in cuts.iter().enumerate() {
        ensure!(
            cuts[..at].iter().all(|before| before.name != of.name),
            "--experts has '{}' twice: the name of a list is that of its file, without folder and extension",
            of.name
        );
    }
    let tensors = model.computed(model.quantizable(options.only.as_ref())?)?;
    let sources = source.same_tensors(&model, &tensors, reference.is_some())?;
    let groups = match options.group.is_empty() {
        true => groups::by(&tensors, options.by),
        false => groups::by_regex(&tensors, &options.group)?,
    };
    check_matrix(matrix.as_ref(), &sources)?;
    let outcomes = candidates
        .iter()
        .map(|candidate| candidate.outcomes(&model, &sources, matrix.as_ref()));
    let outcomes: Vec<_> = outcomes.collect::<Result<_>>()?;

    let base = options.base.as_deref().map(Base::read).transpose()?;
    let program = options.evaluation.program(base.map(|base| base.context))?;
    if !options.prepare {
        let text = options.text.as_deref();
        program.check(&text.into_iter().collect::<Vec<_>>())?;
    }
    let threads = program.threads;
    let folder = work_folder(options, &model);
    let is_new = !folder.exists();
    let folder = make_folder(&folder)?;
    let record = Record::open(&folder)?;
    let unused = Unused(is_new.then(|| folder.clone()));
    let mut identities = Identities::load(&folder);
    let libraries = program.executable.libraries()?;
    let library = match &options.ggml {
        Some(library) => library.clone(),
        None => ggml_library(libraries.clone()).with_context(|| {
            format!(
                "the loader finds no libggml-base.so for {}: use a llama.cpp with shared libraries, or name the library with --ggml",
                text::path(&program.executable.path)
            )
        })?,
    };
    let ggml = Ggml::open(&library)?;
    let content = identities.of_model(source)?;
    let library_hash = identities.of_file(&library)?;
    let parameters = parameters(
        options,
        &program,
        &libraries,
        &mut identities,
        [&model, source],
        matrix.as_ref(),
        &library_hash,
    )?;
    kept::remove_incomplete(&folder.join("tensors"));
    // Quantised tensors have their own keys.
    if !options.prepare {
        record.check(&folder, &parameters)?;
    }
    let mut contents = Vec::new();
    for candidate in &candidates {
        contents.push(match &candidate.origin {
            Origin::Files(model) => identities.of_model(model)?,
            Origin::Type(_) => "quantised".into(),
        });
    }
    let plan = Plan {
        quantizer: Quantizer {
            ggml: &ggml,
            library: &library_hash,
            source,
            in_use: match reference {
                Some(_) => &model.files[..],
                None => &[],
            },
            content: &content,
            matrix: matrix.as_ref(),
            threads,
            folder: &folder.join("tensors"),
        },
        model: &model,
        tensors,
        sources,
        candidates,
        outcomes,
        contents,
        cuts,
        program: &program,
        folder: folder.clone(),
    };
    for (candidate, outcomes) in plan.candidates.iter().zip(&plan.outcomes) {
        if matches!(candidate.origin, Origin::Type(_)) {
            plan.quantizer.check(&plan.sources, outcomes)?;
        }
    }
    let total = 2
        + groups.len() * plan.candidates.len()
        + plan.cuts.len()
        + goal.map_or(0, |_| 1 + plan.candidates.len());
    // Fails if no mix fits, before anything that takes time.
    let results = Results::new(&plan, groups, goal)?;
    for note in notes::before(&plan) {
        eprintln!("llama-sidecar: {note}");
    }
    plan.check_space(options.output.as_deref().zip(options.size))?;
    let logits = folder.join(BASE_LOGITS);
    let makes_base = options.base.is_none() && !options.prepare && !logits.exists();
    if let Some(chunks) = options.evaluation.chunks.filter(|_| makes_base) {
        let vocabulary = base::vocabulary(&source.files);
        base::check(&logits, program.context, chunks, vocabulary)?;
    }
    notes::on_interruption(&folder)?;
    unused.keep();
    *begun = Some(folder.clone());
    let base = match &options.base {
        Some(base) => base
            .canonicalize()
            .with_context(|| format!("cannot open {}", text::path(base)))?,
        None if options.prepare => PathBuf::new(),
        None => make_base(options, &program, source, &folder, total)?,
    };
    if let Some(note) = Base::read(&base).ok().and_then(|base| base.note()) {
        eprintln!("llama-sidecar: {note}");
    }
    let mut sweep = Sweep::new(&plan, base, record, total)?;
    if options.prepare {
        for candidate in 0..plan.candidates.len() {
            println!("{}", text::path(&sweep.file(candidate)?));
        }
        return Ok(());
    }
    let results = results.measure(&mut sweep)?;
    sweep.end()?;
    tables::write_all(&results, &folder)?;
    record::write_atomically(&folder.join("report.html"), page::page(&results).as_bytes())?;
    if let Some(path) = &options.output {
        let recipe = results.recipe.as_ref().context("no recipe")?;
        write::write(
            &plan,
            &recipe.mix,
            &mut sweep,
            path,
            options.outputs,
            |path| caller.check(&results, path),
        )?;
    }
    caller.print(&results, &folder);
    Ok(())
}

/// Prints a note if an importance matrix has no values for some tensors, and fails if it has none for any.
fn check_matrix(matrix: Option<&Matrix>, tensors: &[Tensor<'_>]) -> Result<()> {
    let names = || tensors.iter().map(|tensor| tensor.name);
    let note = matrix.map(|matrix| matrix.check(names())).transpose()?;
    if let Some(note) = note.flatten() {
        eprintln!("llama-sidecar: {}", text::line(&note));
    }
    Ok(())
}

/// Tensors that were quantised.
pub struct Quantized {
    /// The file that has them.
    pub path: PathBuf,
    pub names: Vec<String>,
}

/// Quantises those tensors of a model whose whole names match, as llama-quantize would, with a
/// ggml library, into a file in a folder. The tensors are to be used in another model. Takes half of the processors: the program that evaluates
/// needs the others.
pub fn quantize(
    from: &Path,
    only: &Regex,
    ty: &str,
    imatrix: Option<&Path>,
    library: &Path,
    in_use: &[GgufFile],
    folder: &Path,
) -> Result<Quantized> {
    let model = Model::open(from)?;
    let matrix = imatrix.map(Matrix::load).transpose()?;
    let tensors = model.quantizable(Some(only))?;
    check_matrix(matrix.as_ref(), &tensors)?;
    let is_type = |of: &Candidate| matches!(of.origin, Origin::Type(_));
    let candidate = Candidate::parse(ty).ok().filter(is_type);
    let candidate = candidate.with_context(|| {
        format!("'{ty}' is no type of ggml, such as q4_K; a file is passed to --from")
    })?;
    let outcomes = candidate.outcomes(&model, &tensors, matrix.as_ref())?;
    for line in candidate.fallbacks(&outcomes) {
        eprintln!("llama-sidecar: {line}");
    }
    let quantizer = Quantizer {
        ggml: &Ggml::open(library)?,
        library: "",
        source: &model,
        in_use,
        content: "",
        matrix: matrix.as_ref(),
        threads: processors().div_ceil(2),
        folder,
    };
    let bar = ProgressBar::hidden();
    Ok(Quantized {
        path: quantizer.make(&candidate.name, &tensors, &outcomes, &bar)?,
        names: tensors.iter().map(|tensor| tensor.name.into()).collect(),
    })
}

/// A work folder that is removed unless it is used: this process made it, and has its lock.
struct Unused(Option<PathBuf>);

impl Unused {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            // What is left only takes space.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

fn work_folder(options: &TuneOptions, model: &Model) -> PathBuf {
    let work = options.work.clone();
    work.unwrap_or_else(|| beside(&model.path, ".tune"))
}

/// Returns everything that figures depend on, by the name that a message uses.
fn parameters(
    options: &TuneOptions,
    program: &Program,
    libraries: &[PathBuf],
    identities: &mut Identities,
    [model, source]: [&Model; 2],
    matrix: Option<&Matrix>,
    library: &str,
) -> Result<BTreeMap<&'static str, String>> {
    let mut built = String::new();
    for path in libraries {
        built += &identities.of_file(path)?;
    }
    let mut file = |path: &Option<PathBuf>| match path {
        Some(path) => identities.of_file(path),
        None => Ok("none".into()),
    };
    let mut parameters = BTreeMap::from([
        ("text", file(&options.text)?),
        ("base", file(&options.base)?),
        ("program", format!("{:032x}", hash_bytes(built.as_bytes()))),
        ("ggml library", library.to_owned()),
        (
            "imatrix",
            matrix.map_or("none".into(), |matrix| format!("{:032x}", matrix.hash())),
        ),
        ("ctx", program.context.to_string()),
        (
            "chunks",
            match (options.evaluation.chunks, options.time) {
                (Some(chunks), _) => chunks.to_string(),
                (None, Some(_)) => "by --time".into(),
                (None, None) => "all".into(),
            },
        ),
        ("list of arguments after --", program.arguments.join(" ")),
        ("environment", environment()),
    ]);
    parameters.insert("model", identities.of_model(model)?);
    parameters.insert("reference", identities.of_model(source)?);
    Ok(parameters)
}

/// Returns how many chunks of the text so many evaluations can have in a time.
fn chunks_in(
    time: Duration,
    evaluations: usize,
    mut write: impl FnMut(Option<u32>) -> Result<Base>,
) -> Result<u32> {
    // The first time, the model may be read from a disk.
    write(Some(FEWEST))?;
    let began = Instant::now();
    write(Some(FEWEST))?;
    let of_chunk = began.elapsed().as_secs_f64() / f64::from(FEWEST);
    let of_all = of_chunk * evaluations as f64;
    let chunks = (time.as_secs_f64() / of_all) as u32;
    ensure!(
        chunks >= FEWEST,
        "{evaluations} evaluations of {FEWEST} chunks take {:.0} minutes: pass a longer --time, fewer --types, or --chunks",
        (of_all * f64::from(FEWEST) / 60.0).ceil()
    );
    eprintln!(
        "llama-sidecar: {evaluations} evaluations of {chunks} chunks at most, in about {:.0} minutes",
        (of_all * f64::from(chunks) / 60.0).ceil()
    );
    Ok(chunks)
}

/// Returns the variables that change how llama.cpp evaluates.
fn environment() -> String {
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.into_string().ok()?;
        let is_relevant = name.starts_with("GGML_") || name.starts_with("LLAMA_ARG_");
        is_relevant.then(|| format!("{name}={}", value.to_string_lossy()))
    });
    let mut variables: Vec<String> = variables.collect();
    variables.sort();
    variables.join(" ")
}

/// Makes the base logits for so many evaluations, if the work folder has none.
fn make_base(
    options: &TuneOptions,
    program: &Program,
    source: &Model,
    folder: &Path,
    evaluations: usize,
) -> Result<PathBuf> {
    let path = folder.join(BASE_LOGITS);
    if path.exists() {
        return Ok(path);
    }
    let text = options
        .text
        .as_deref()
        .context("no text: pass --text or --base")?;
    eprintln!(
        "llama-sidecar: making the base logits with {}",
        text::path(&source.path)
    );
    let [part, log] = ["base.part", "base.log"].map(|name| folder.join(name));
    let mut write = |chunks| program.write_base(&source.path, text, chunks, &part, &log);
    let chunks = match options.time {
        Some(time) => Some(chunks_in(time, evaluations, &mut write)?),
        None => options.evaluation.chunks,
    };
    write(chunks)?;
    check_files(&source.files)?;
    let written = std::fs::File::open(&part).and_then(|file| {
        file.sync_all()?;
        std::fs::rename(&part, &path)
    });
    written.with_context(|| format!("cannot write {}", text::path(&path)))?;
    Ok(path)
}
