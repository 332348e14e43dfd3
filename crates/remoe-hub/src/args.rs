//! The model and `--model-cache`, for every program that reads a model.

use crate::access::Access;
use crate::demo;
use crate::egress::{Egress, EgressRule};
use crate::error::FetchError;
use crate::location::{LocationError, ModelLocation};
use crate::store::FetchedStore;
use crate::timeouts::{FetchTimeouts, StallLimit};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Args, Command, FromArgMatches};
use remoe_model::{Checkpoint, CheckpointError, Folder, Outline, Store};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Location of the model: `MODEL` or `--model MODEL`, and `--model-cache`.
#[derive(Debug, Clone)]
pub struct ModelArgs {
    /// Location of the model.
    pub model: ModelLocation,
    /// Cache folder of models that are fetched.
    pub model_cache: Option<PathBuf>,
    /// Hosts and credentials that may be used to fetch it.
    pub sources: SourceArgs,
}

/// `--allow-source` and `--ambient-credentials`.
// Not read from the environment: a pod's environment comes from a Secret that its user controls.
#[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args)]
pub struct SourceArgs {
    /// Allowed sources of models, separated by commas: HOST[:PORT] with * for any characters, CIDR for addresses that
    /// are not public, !CIDR to refuse addresses. Default: any host with a public, private or loopback address
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub allow_source: Vec<EgressRule>,
    /// Use the AWS role of this machine or pod for s3:// if AWS_ACCESS_KEY_ID is not set. Default: unsigned requests
    #[arg(long)]
    pub ambient_credentials: bool,
}

impl SourceArgs {
    fn access(&self) -> Access {
        let egress = match &self.allow_source[..] {
            [] => Egress::default(),
            rules => rules.iter().cloned().collect(),
        };
        Access { egress, ambient_credentials: self.ambient_credentials, ..Access::default() }
    }

    fn arguments(&self) -> Vec<OsString> {
        let rules: Vec<String> = self.allow_source.iter().map(EgressRule::to_string).collect();
        let mut arguments = Vec::new();
        if !rules.is_empty() {
            arguments.extend(["--allow-source".into(), rules.join(",").into()]);
        }
        if self.ambient_credentials {
            arguments.push("--ambient-credentials".into());
        }
        arguments
    }
}

/// Forms of a model's location, for the message about a missing one.
const LOCATION_FORMS: &str =
    "a Hugging Face folder, hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or https://HOST/PATH";

/// Arguments as clap parses them. The group `model_source` holds both forms of the model.
#[derive(clap::Args)]
// The group names its arguments: with flattened structs alone it would be empty, and never present.
#[group(id = "ModelArgs", multiple = true, args = ["model_positional", "model", "model_cache"])]
struct RawModelArgs {
    /// Model, required here or as --model: a Hugging Face folder, hf://ORGANISATION/NAME[@REVISION],
    /// s3://BUCKET/PREFIX or https://HOST/PATH; demo is the demo model of an installed package
    #[arg(id = "model_positional", value_name = "MODEL", group = "model_source", value_parser = location_parser())]
    positional: Option<ModelLocation>,
    /// Same as MODEL
    #[arg(long, value_name = "MODEL", group = "model_source", value_parser = location_parser())]
    model: Option<ModelLocation>,
    /// Cache folder of fetched models; processes may share it [env: REMOE_MODEL_CACHE] [default: remoe/models in the
    /// user's cache folder]
    // Not read from the environment here: a variable alone would make these arguments present.
    #[arg(long, value_name = "DIR")]
    model_cache: Option<PathBuf>,
    #[command(flatten)]
    sources: SourceArgs,
}

/// Returns the parser of a model's location, for arguments outside of [`ModelArgs`].
pub fn location_parser() -> impl TypedValueParser<Value = ModelLocation> {
    OsStringValueParser::new().try_map(|text| {
        let location = ModelLocation::try_from(text)?;
        Ok::<_, LocationError>(demo::resolve(location, std::env::current_exe().ok().as_deref()))
    })
}

// Implemented by hand, because `MODEL` and `--model MODEL` fill one field.
impl FromArgMatches for ModelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let RawModelArgs { positional, model, model_cache, sources } =
            RawModelArgs::from_arg_matches(matches)?;
        let model = positional.or(model).ok_or_else(|| {
            let mut error = clap::Error::new(ErrorKind::MissingRequiredArgument);
            // Names the positional form, which is the usual one.
            let missing = format!("<MODEL> ({LOCATION_FORMS})");
            error.insert(ContextKind::InvalidArg, ContextValue::Strings(vec![missing]));
            error
        })?;
        Ok(Self { model, model_cache, sources })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for ModelArgs {
    fn group_id() -> Option<clap::Id> {
        RawModelArgs::group_id()
    }

    fn augment_args(command: Command) -> Command {
        RawModelArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        RawModelArgs::augment_args_for_update(command)
    }
}

/// An open model.
#[derive(Debug)]
pub struct OpenedModel {
    /// Checkpoint of the model.
    pub checkpoint: Checkpoint,
    /// Commit of a hub repository. `None` for other locations.
    pub revision: Option<String>,
    /// Cache folder of its source. `None` for a model in a local folder.
    pub cache: Option<PathBuf>,
}

/// Store with the files of a model.
struct LocatedModel {
    store: Arc<dyn Store>,
    revision: Option<String>,
    cache: Option<PathBuf>,
}

/// A model whose sizes are known.
#[derive(Debug)]
pub enum SizedModel {
    /// Checkpoint whose sizes come from the headers of its weights.
    Checkpoint(Box<OpenedModel>),
    /// Model whose sizes come from its config alone.
    Outline {
        /// Outline of its config.
        outline: Outline,
        /// Reason why the engine cannot run it as a checkpoint.
        reason: CheckpointError,
    },
}

impl ModelArgs {
    /// Opens the model. For a remote model, fetches the headers that are not in the cache.
    ///
    /// # Errors
    /// The source fails, or its files are not a valid checkpoint.
    pub fn open(&self) -> Result<OpenedModel, CheckpointError> {
        self.open_with(FetchTimeouts::default())
    }

    /// Opens the model as [`Self::open`] does. `stall_limit` applies to this and all later reads of the source.
    ///
    /// # Errors
    /// The source fails, or its files are not a valid checkpoint.
    pub fn open_within(&self, stall_limit: StallLimit) -> Result<OpenedModel, CheckpointError> {
        self.open_with(FetchTimeouts::default().with_stall_limit(stall_limit))
    }

    fn open_with(&self, timeouts: FetchTimeouts) -> Result<OpenedModel, CheckpointError> {
        let LocatedModel { store, revision, cache } = self.locate(timeouts)?;
        Ok(OpenedModel { checkpoint: Checkpoint::open_in(store)?, revision, cache })
    }

    /// Opens the model. If its weights are missing or the engine does not support it, returns its outline from
    /// `config.json` instead. The outline counts weights in `dtype`, by default in the config's dtype.
    ///
    /// # Errors
    /// The source fails, the checkpoint is damaged, or the config lacks sizes.
    pub fn open_or_outline(&self, dtype: Option<&str>) -> Result<SizedModel, CheckpointError> {
        let LocatedModel { store, revision, cache } = self.locate(FetchTimeouts::default())?;
        match Checkpoint::open_in(Arc::clone(&store)) {
            Ok(checkpoint) => {
                Ok(SizedModel::Checkpoint(Box::new(OpenedModel { checkpoint, revision, cache })))
            }
            Err(reason @ (CheckpointError::MissingFile { .. } | CheckpointError::Unsupported { .. })) => {
                Ok(SizedModel::Outline { outline: Outline::open_in(&*store, dtype)?, reason })
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the store of the model's files, and the commit of a hub repository.
    ///
    /// # Errors
    /// The source cannot be reached.
    pub fn store(&self) -> Result<(Arc<dyn Store>, Option<String>), CheckpointError> {
        let LocatedModel { store, revision, .. } = self.locate(FetchTimeouts::default())?;
        Ok((store, revision))
    }

    fn locate(&self, timeouts: FetchTimeouts) -> Result<LocatedModel, CheckpointError> {
        if let ModelLocation::Folder(folder) = &self.model {
            if let Some(hub) = self.model.on_hub().filter(|_| !folder.exists()) {
                return Err(CheckpointError::MissingFile {
                    path: folder.clone(),
                    message: format!("no such folder; for the model of the Hugging Face hub, write {hub}"),
                });
            }
            return Ok(LocatedModel { store: Arc::new(Folder::new(folder)), revision: None, cache: None });
        }
        let connect = || {
            FetchedStore::connect(
                &self.model,
                &cache_folder(self.model_cache.as_deref())?,
                &Access { timeouts, ..self.sources.access() },
            )
        };
        let store = connect().map_err(|error| CheckpointError::Store {
            path: self.model.to_string().into(),
            source: error.into(),
        })?;
        let (revision, cache) = (store.revision().map(str::to_owned), store.cache().to_owned());
        Ok(LocatedModel { store: Arc::new(store), revision, cache: Some(cache) })
    }

    /// Returns these arguments with the commit of `opened`, so that other programs read the same files.
    #[must_use]
    pub fn pinned(&self, opened: &OpenedModel) -> Self {
        let model = match (&self.model, &opened.revision) {
            (ModelLocation::Hub { repository, .. }, Some(commit)) => {
                ModelLocation::Hub { repository: repository.clone(), revision: Some(commit.clone()) }
            }
            (location, _) => location.clone(),
        };
        Self { model, ..self.clone() }
    }

    /// Formats the arguments for another program's command line.
    #[must_use]
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments = vec!["--model".into(), self.model.to_os_string()];
        arguments.extend(self.options());
        arguments
    }

    /// Formats the arguments without the model.
    #[must_use]
    pub fn options(&self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        if let Some(cache) = &self.model_cache {
            arguments.extend(["--model-cache".into(), cache.clone().into()]);
        }
        arguments.extend(self.sources.arguments());
        arguments
    }
}

/// Returns the cache folder of models: `given`, else `REMOE_MODEL_CACHE`, else one in the user's cache folder.
///
/// # Errors
/// No source of a folder is set.
pub fn cache_folder(given: Option<&Path>) -> Result<PathBuf, FetchError> {
    if let Some(folder) = given {
        return Ok(folder.to_owned());
    }
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(folder) = variable("REMOE_MODEL_CACHE") {
        return Ok(folder);
    }
    let user = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    let folder = user.map(|user| user.join("remoe").join("models"));
    folder.ok_or_else(|| FetchError::Settings {
        what: "missing --model-cache".to_owned(),
        problem: "this user has no cache folder; set it, or REMOE_MODEL_CACHE".to_owned(),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        source: ModelArgs,
    }

    #[derive(Parser)]
    struct Optional {
        #[command(flatten)]
        source: Option<ModelArgs>,
    }

    #[test]
    fn optional_model_is_present_only_if_given() {
        let named = |arguments: &[&str]| {
            let arguments = std::iter::once("program").chain(arguments.iter().copied());
            Optional::try_parse_from(arguments).map(|program| program.source.is_some())
        };
        assert!(named(&["a/model"]).is_ok_and(|is_named| is_named));
        assert!(named(&["--model", "a/model", "--allow-source", "a.example"]).is_ok_and(|is_named| is_named));
        assert!(named(&[]).is_ok_and(|is_named| !is_named));
    }

    fn parse(arguments: &[&str]) -> Result<ModelArgs, clap::Error> {
        let arguments = std::iter::once("program").chain(arguments.iter().copied());
        Program::try_parse_from(arguments).map(|program| program.source)
    }

    #[test]
    fn missing_folder_named_like_repository_suggests_hf_location() {
        for name in ["Qwen/Qwen3-30B-A3B", "no-such-organisation/name"] {
            let error = parse(&[name]).unwrap().open().unwrap_err().to_string();
            assert!(error.contains(&format!("write hf://{name}")), "{error}");
        }
        for path in ["name", "./a/b", "/a/b", "a/b/c", "../b", "a b/c", "no-such-folder/"] {
            let error = parse(&[path]).unwrap().open().unwrap_err().to_string();
            assert!(!error.contains("hf://"), "{error}");
        }
        // A folder that exists is opened as one.
        let folder = tempfile::tempdir_in(".").unwrap();
        std::fs::create_dir(folder.path().join("model")).unwrap();
        let name = folder.path().file_name().unwrap().to_str().unwrap().to_owned() + "/model";
        let error = parse(&[&name]).unwrap().open().unwrap_err().to_string();
        assert!(error.contains("config.json") && !error.contains("hf://"), "{error}");
    }

    #[test]
    fn model_parses_as_positional_or_flag() {
        for arguments in [&["a/b"][..], &["--model", "a/b"], &["a/b", "--model-cache", "c"]] {
            assert_eq!(parse(arguments).unwrap().model, ModelLocation::Folder("a/b".into()), "{arguments:?}");
        }
        assert_eq!(parse(&["a", "--model", "b"]).unwrap_err().kind(), ErrorKind::ArgumentConflict);
        assert!(parse(&["hf://nowhere"]).unwrap_err().to_string().contains("organisation"));
        let limited = parse(&["a", "--allow-source", "*.hf.co,10.0.0.0/8", "--ambient-credentials"]).unwrap();
        assert_eq!(
            limited.arguments(),
            ["--model", "a", "--allow-source", "*.hf.co,10.0.0.0/8", "--ambient-credentials"]
        );
        assert!(parse(&["a", "--allow-source", "https://a"]).is_err());
        for nothing in [&[][..], &["--model-cache", "c"]] {
            let error = parse(nothing).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument);
            assert!(error.to_string().contains(&format!("  <MODEL> ({LOCATION_FORMS})\n")), "{error}");
        }
    }
}
