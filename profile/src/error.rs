//! What can be wrong with profiles, prices and what is to be made of them.

/// A profile that cannot be read or believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("profile: {}", at(field, message))]
pub struct ProfileError {
    /// The field that is wrong, as `expert_seconds.seconds[1][0]`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// Prices that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("prices: {}", at(field, message))]
pub struct PricesError {
    /// The field that is wrong; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// A list of nodes that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("nodes: {}", at(field, message))]
pub struct NodesError {
    /// The field that is wrong, as `nodes[2].perHour`; empty: the file as a whole.
    pub field: String,
    /// The value, what was expected and what to do.
    pub message: String,
}

/// Why no problem can be made of a profile and a model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemError {
    /// The profile was made of other weights.
    #[error(
        "the profile was made from checkpoint {profile}, this one is {model}; \
         make a profile of this model (remoe profile)"
    )]
    ForeignModel {
        /// Fingerprint in the profile.
        profile: String,
        /// Fingerprint of the checkpoint.
        model: String,
    },
    /// The profile was made in another dtype.
    #[error(
        "the profile was made in {profile}, the model is to run in {wanted}; make one in {wanted} (remoe profile --dtype, --experts-dtype)"
    )]
    ForeignDtype {
        /// The profile's.
        profile: String,
        /// The one to plan for.
        wanted: String,
    },
    /// GPU memory would be paid for as main memory.
    #[error(
        "the main function is on a GPU, and the prices name none: state what one costs (gpuHour and \
         gpuMemoryMB), or plan for the CPU"
    )]
    NoGpuPrice,
    /// There is nothing to place.
    #[error("a model of family {family} without routed experts has nothing to plan")]
    NoExperts {
        /// The model's family.
        family: String,
    },
    /// Figures that the planner refuses.
    #[error("problem: {0}")]
    Field(#[from] remoe_planner::FieldError),
}

fn at(field: &str, message: &str) -> String {
    if field.is_empty() { message.to_owned() } else { format!("{field} {message}") }
}
