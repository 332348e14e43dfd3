//! Predictors, and the records that they are made of, read from files.

use crate::exit::{CliError, Code};
use crate::output::progress;
use remoe_hub::ModelArgs;
use remoe_model::{Checkpoint, CheckpointError, StoredDtype, TensorRef};
use remoe_predictor::record::{ActivationRecord, RecordError, RecordHeader, RecordReader};
use remoe_predictor::{
    Embedding, EmbeddingType, Fate, GateWeights, PREDICTOR_FILE, PredictError, TrainedPredictor,
};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A checkpoint as far as predictors look into it.
pub(crate) struct PredictorModel {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) embedding: Embedding,
    /// Fingerprint of the checkpoint.
    pub(crate) fingerprint: String,
}

impl PredictorModel {
    /// Reads the embedding.
    pub(crate) fn open(source: &ModelArgs) -> Result<Self, CliError> {
        Self::of(Arc::new(source.open()?.checkpoint))
    }

    /// Reads the embedding of an open checkpoint.
    pub(crate) fn of(checkpoint: Arc<Checkpoint>) -> Result<Self, CliError> {
        if checkpoint.config().moe_layers().is_empty() {
            return Err(CliError::arguments("--model", "invalid --model: no layer with routed experts"));
        }
        let tensor = checkpoint.embedding();
        let table = checkpoint.read(tensor)?;
        let embedding = Embedding::new(checkpoint.config().hidden_size, element_type(tensor), table.into())?;
        let fingerprint = checkpoint.fingerprint()?.to_string();
        Ok(Self { checkpoint, embedding, fingerprint })
    }

    /// The predictor that `remoe predictor build` saved in `folder` for this model.
    pub(crate) fn saved_predictor(&self, folder: &Path) -> Result<TrainedPredictor, CliError> {
        let path = folder.join(PREDICTOR_FILE);
        let failed = |message: String| CliError {
            path: Some(path.clone()),
            ..CliError::arguments("--predictor", format!("{}: {message}", path.display()))
        };
        let bytes =
            std::fs::read(&path).map_err(|error| failed(format!("{error}; run `remoe predictor build`")))?;
        TrainedPredictor::from_bytes(&bytes.into(), &self.fingerprint, &self.embedding)
            .map_err(|error| failed(error.to_string()))
    }

    /// Reads the predictor in `folder`, else the one in the folder of the model of `checkpoint`; `None` if there is neither.
    pub(crate) fn predictor_of(
        checkpoint: &Arc<Checkpoint>,
        folder: Option<&Path>,
    ) -> Result<Option<TrainedPredictor>, CliError> {
        match predictor_folder(checkpoint, folder) {
            Some(folder) => Ok(Some(Self::of(Arc::clone(checkpoint))?.saved_predictor(&folder)?)),
            None => Ok(None),
        }
    }

    /// Reads the predictor in `folder`, else the one in the folder of this model; `None` if there is neither.
    pub(crate) fn predictor(&self, folder: Option<&Path>) -> Result<Option<TrainedPredictor>, CliError> {
        let folder = predictor_folder(&self.checkpoint, folder);
        folder.map(|folder| self.saved_predictor(&folder)).transpose()
    }

    /// The Fate-style baseline from the norms and routers.
    pub(crate) fn fate(&self) -> Result<Fate, CliError> {
        let config = self.checkpoint.config();
        let mut layers = Vec::new();
        let (mut experts, mut top_k) = (0, 0);
        for layer in config.moe_layers() {
            let (Some(facts), Some(router)) = (config.moe(layer), self.checkpoint.router(layer)?) else {
                continue;
            };
            (experts, top_k) = (facts.experts, facts.top_k);
            let norm = self.floats(&self.checkpoint.norms(layer)?.mlp.weight)?;
            layers.push(GateWeights { norm, gate: self.floats(&router.linear.weight)? });
        }
        Ok(Fate::new(self.embedding.clone(), layers, experts, top_k, config.norm_eps as f32)?)
    }

    fn floats(&self, tensor: &TensorRef) -> Result<Vec<f32>, CheckpointError> {
        Ok(element_type(tensor).floats(&self.checkpoint.read(tensor)?))
    }

    /// The records in a file, which must be of this model; what is damaged in it is reported and left
    /// out. Experts of single tokens are not kept.
    pub(crate) fn records(
        &self,
        flag: &str,
        path: &Path,
    ) -> Result<(RecordHeader, Vec<ActivationRecord>), CliError> {
        let of_file = |error: RecordError| CliError::record_file(flag, path, &error);
        let file = File::open(path).map_err(|error| of_file(error.into()))?;
        let mut reader = RecordReader::new(BufReader::new(file)).map_err(of_file)?;
        let mut header = reader.header().clone();
        self.expected(&header).require_same(&header).map_err(of_file)?;
        let without_tokens = |record: Result<ActivationRecord, _>| {
            record.map(|record| ActivationRecord { experts: None, ..record })
        };
        let records = reader.by_ref().map(without_tokens).collect::<Result<Vec<_>, _>>().map_err(of_file)?;
        for damage in reader.damage() {
            progress::print_warning(&format!("{}: {damage}", path.display()));
        }
        header.tokens = false;
        Ok((header, records))
    }

    /// The header that records of this model have; `found` says what the model does not fix.
    fn expected(&self, found: &RecordHeader) -> RecordHeader {
        let config = self.checkpoint.config();
        let layers = config.moe_layers();
        let moe = layers.first().and_then(|&layer| config.moe(layer));
        RecordHeader {
            model: self.fingerprint.clone(),
            layers: layers.iter().map(|&layer| layer as u32).collect(),
            experts: moe.map_or(0, |moe| moe.experts as u32),
            top_k: moe.map_or(0, |moe| moe.top_k as u32),
            ..found.clone()
        }
    }
}

/// `folder`, else the one in the model's own folder where there is one.
fn predictor_folder(checkpoint: &Checkpoint, folder: Option<&Path>) -> Option<PathBuf> {
    // A place that is no folder has none beside it.
    let beside = || Some(checkpoint.store().root().join("predictor")).filter(|beside| beside.is_dir());
    folder.map(Path::to_owned).or_else(beside)
}

fn element_type(tensor: &TensorRef) -> EmbeddingType {
    match tensor.dtype {
        StoredDtype::F32 => EmbeddingType::F32,
        StoredDtype::Bf16 => EmbeddingType::Bf16,
        StoredDtype::F16 => EmbeddingType::F16,
    }
}

impl CliError {
    /// Records that cannot be used, from the file that `flag` names.
    fn record_file(flag: &str, path: &Path, error: &RecordError) -> Self {
        let message = format!("{}: {error}", path.display());
        Self { path: Some(path.to_owned()), ..Self::arguments(flag, message) }
    }
}

impl From<PredictError> for CliError {
    fn from(error: PredictError) -> Self {
        match &error {
            PredictError::Option { option, .. } => Self::arguments(&format!("--{option}"), error.to_string()),
            PredictError::EmptyPrompt | PredictError::Token { .. } => {
                Self::arguments("--prompt", error.to_string())
            }
            PredictError::NotFinite { .. } => {
                Self { code: Code::Checkpoint, ..Self::runtime(error.to_string()) }
            }
            _ => Self::runtime(error.to_string()),
        }
    }
}
