//! Expert usage of a model, learned from its requests.

use crate::deployment::Wanted;
use crate::exit::CliError;
use crate::flags::default_dtype;
use crate::predictors::Model;
use remoe_gateway_core::{Privacy, Witness};
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{ByPhase, Shares, TunedPredictor};
use remoe_usage::{Foresight, ForesightMetrics, ForesightOptions, Keeps, Mix, Prompts, Watch};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Longest time that a wake waits for the predictions of waiting requests. They take less than a millisecond each.
const PREDICTIONS: Duration = Duration::from_millis(250);
/// Requests to go by before a placement follows what is used.
const ENOUGH: f64 = 4.0;

/// Follows the requests of one model.
pub(crate) struct UsageLearner {
    watch: Arc<Watch>,
    /// Recent expert usage, once that is enough to go by.
    pub(crate) observed: watch::Receiver<Option<Shares>>,
    /// Mean usage of the requests that were remembered at the start, if they are enough to go by.
    pub(crate) remembered: Option<Shares>,
}

/// A gateway's end of a [`Watch`].
struct Watching(Arc<Watch>);

impl Witness for Watching {
    fn came(&self, id: u64, tenant: &str, privacy: Privacy, body: &axum::body::Bytes) -> bool {
        let keeps = match privacy {
            Privacy::Shared => Keeps::Shared,
            Privacy::None => Keeps::Records,
            Privacy::CountsOnly => Keeps::Counts,
            Privacy::LeftOut => Keeps::Nothing,
        };
        self.0.came(id, tenant, keeps, body)
    }

    fn told(&self, id: u64, activations: &str) {
        self.0.told(id, activations);
    }

    fn left(&self, id: u64) {
        self.0.left(id);
    }
}

/// Memory of a model's requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory<'a> {
    /// Folder that keeps it over restarts.
    pub(crate) folder: Option<&'a Path>,
    /// Limit of its size.
    pub(crate) folder_bytes: u64,
    /// Requests are predicted without it.
    pub(crate) forgets: bool,
}

impl UsageLearner {
    /// Begins to follow the requests of `wanted`'s model, whose predictor is in the folder `predictor` or its own; a
    /// typical one has so many `tokens`.
    pub(crate) fn open(
        wanted: &Wanted,
        memory: Memory<'_>,
        predictor: Option<&Path>,
        tokens: ByPhase<f64>,
        metrics: &ForesightMetrics,
    ) -> Result<Self, CliError> {
        let model = Model::of(wanted.checkpoint.clone())?;
        let facts = &wanted.inspection;
        let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let header = RecordHeader {
            model: model.fingerprint.clone(),
            layers: facts.moe_layers.iter().map(|layer| number(*layer)).collect(),
            experts: number(facts.experts),
            top_k: number(facts.top_k),
            dtype: wanted.options.dtype.clone().unwrap_or_else(|| default_dtype(facts).to_owned()),
            tokens: false,
        };
        let trained = model.predictor(predictor)?;
        // One folder serves for several models.
        let folder = memory.folder.map(|folder| folder.join(&model.fingerprint));
        let options = ForesightOptions {
            store: folder.map(|folder| (folder, memory.folder_bytes)),
            forgets: memory.forgets,
            output_tokens: tokens.decode,
        };
        let prompts = Prompts::open(&wanted.checkpoint)?;
        let trained = trained.map(|trained| Box::new(trained) as Box<dyn TunedPredictor>);
        let foresight = Foresight::new(header, model.embedding, prompts, trained, options)
            .map_err(|error| CliError::arguments("--experience", error.to_string()))?;
        let is_enough = foresight.remembered().0 as f64 >= ENOUGH;
        let remembered = if is_enough { foresight.mean(tokens)? } else { None };
        let (tell, observed) = watch::channel(None);
        let metrics = metrics.of_model(&wanted.name());
        let watch = Watch::start(foresight, None, move |foresight, _news| {
            metrics.show(foresight);
            let observed = foresight.observed();
            if observed.requests() >= ENOUGH
                && let Ok(mix) = observed.mix()
            {
                tell.send_replace(mix.map(|mix| mix.shares));
            }
        });
        let watch = watch.map_err(|error| CliError::runtime(format!("cannot start a thread: {error}")))?;
        Ok(Self { watch: Arc::new(watch), observed, remembered })
    }

    /// Returns the witness of the model's requests.
    pub(crate) fn witness(&self) -> Arc<dyn Witness> {
        Arc::new(Watching(self.watch.clone()))
    }

    /// Returns the present requests.
    pub(crate) fn present(&self) -> Present {
        Present(self.watch.clone())
    }

    /// Returns the recent expert usage, if that is enough to go by.
    pub(crate) fn of_late(&self) -> Option<Shares> {
        self.observed.borrow().clone()
    }
}

/// Requests that wait or are worked on.
pub(crate) struct Present(Arc<Watch>);

impl Present {
    /// Predicts which experts they will use; `None` if that is not known.
    pub(crate) async fn mix(self) -> Option<Mix> {
        tokio::task::spawn_blocking(move || self.0.mix(PREDICTIONS)).await.ok().flatten()
    }
}
