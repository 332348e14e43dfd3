//! The pure step for the model's facts: known, being found out, or not to be had.

use super::facts::{FactsError, ModelFacts};
use super::names::{self, COMPONENT, Component, PodName, SUBJECT};
use super::pods::{Outcome, Trouble, is_controlled_by, outcome};
use super::rollout::{Deletion, pause};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use serde::Deserialize;

/// What is to be done about the facts.
#[derive(Debug, Clone, PartialEq)]
pub enum Inspecting {
    /// They are known.
    Known(Box<ModelFacts>),
    /// An inspector is to be started.
    Start {
        /// How many came before.
        incarnation: u32,
        /// Why the one before found nothing.
        after: Option<Trouble>,
    },
    /// An inspector is at work.
    Waiting {
        /// What keeps it.
        trouble: Option<Trouble>,
    },
    /// An inspector is done: its log has the facts.
    Read {
        /// Its pod.
        pod: String,
    },
    /// The last inspector found nothing; another one is due later.
    Failed {
        /// Why.
        trouble: Trouble,
        /// When the next one is started.
        retry_at: Timestamp,
    },
}

/// How the inspection of `subject` at `place` stands.
pub fn inspecting(
    map: Option<&ConfigMap>,
    pods: &[Pod],
    owner_uid: &str,
    subject: &str,
    place: &str,
    now: Timestamp,
) -> Inspecting {
    if let Some(facts) = map.and_then(|map| ModelFacts::from_config_map(map, subject)) {
        return Inspecting::Known(Box::new(facts));
    }
    let named = pods.iter().filter_map(|pod| Some((PodName::parse(&pod.name_any())?, pod)));
    let newest = named.filter(|(name, _)| name.place == place).max_by_key(|(name, _)| name.incarnation);
    let Some((name, pod)) = newest else { return Inspecting::Start { incarnation: 0, after: None } };
    if pod.metadata.deletion_timestamp.is_some() || !is_controlled_by(pod, owner_uid) {
        return Inspecting::Start { incarnation: name.incarnation + 1, after: None };
    }
    match outcome(pod) {
        Outcome::Running { trouble } => Inspecting::Waiting { trouble },
        Outcome::Succeeded => Inspecting::Read { pod: name.to_string() },
        Outcome::Failed { trouble, at } => {
            let trouble = explained(trouble);
            let ended = at.unwrap_or(now);
            let retry_at = ended.checked_add(pause(name.incarnation + 1)).unwrap_or(now);
            if now < retry_at {
                Inspecting::Failed { trouble, retry_at }
            } else {
                Inspecting::Start { incarnation: name.incarnation + 1, after: Some(trouble) }
            }
        }
    }
}

/// Inspectors that are no longer of use: done, failed and followed by another, or about something else.
pub fn useless_inspectors(pods: &[Pod], owner_uid: &str, subject: &str, state: &Inspecting) -> Vec<Deletion> {
    let inspectors = pods.iter().filter(|pod| {
        names::label(&pod.metadata, COMPONENT) == Component::Inspector.name()
            && is_controlled_by(pod, owner_uid)
            && pod.metadata.deletion_timestamp.is_none()
    });
    let useless = inspectors.filter(|pod| {
        names::label(&pod.metadata, SUBJECT) != subject
            || match state {
                Inspecting::Known(_) | Inspecting::Start { .. } => true,
                Inspecting::Waiting { .. } | Inspecting::Read { .. } | Inspecting::Failed { .. } => false,
            }
    });
    let deletion = |pod: &Pod| Some(Deletion { name: pod.name_any(), uid: pod.uid()? });
    useless.filter_map(deletion).collect()
}

/// What `remoe --json` prints when it fails.
#[derive(Deserialize)]
struct Refusal {
    error: RefusalBody,
}

#[derive(Deserialize)]
struct RefusalBody {
    message: String,
}

/// The inspector's own words, where its log has them.
fn explained(trouble: Trouble) -> Trouble {
    let refusal = trouble.message.lines().rev().find_map(|line| serde_json::from_str::<Refusal>(line).ok());
    match refusal {
        Some(refusal) => Trouble::new("ModelUnreadable", refusal.error.message),
        None => trouble,
    }
}

impl From<FactsError> for Trouble {
    fn from(error: FactsError) -> Self {
        Self::new("ModelUnreadable", error.to_string())
    }
}
