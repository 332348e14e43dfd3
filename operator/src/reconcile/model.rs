//! The facts of the checkpoint, and the inspector that finds them out.

use super::{LATER, ReconcileError, Run, SOON};
use crate::api::RESTARTED_AT;
use crate::apply::Made;
use crate::build::{BuildError, inspector, inspector_place};
use crate::errand::{Errand, useless};
use crate::events::Happening;
use crate::facts::{ModelFacts, subject};
use crate::inspection::{Inspecting, inspecting};
use crate::names::Component;
use crate::pods::Trouble;
use crate::status::PlanState;
use kube::ResourceExt;

impl Run<'_> {
    /// The facts of the checkpoint, or what is done to get them.
    pub(super) async fn model(&mut self) -> Result<Result<ModelFacts, PlanState>, ReconcileError> {
        let restarted_at = self.owner.annotations().get(RESTARTED_AT).map(String::as_str);
        let subject = subject(&self.owner.spec.model, restarted_at)?;
        let place = inspector_place(&self.owner.name_any(), &subject);
        let uid = self.owner.uid().unwrap_or_default();
        let state = inspecting(self.there.model.as_ref(), &self.there.pods, &uid, &subject, &place, self.now);
        let useful = state.errand().map(|errand| (subject.as_str(), errand));
        let over = useless(&self.there.pods, &uid, Component::Inspector, useful);
        self.applier.delete(&over).await?;
        let waiting = |trouble| Ok(Err(PlanState::Inspecting { trouble }));
        let errand = match state {
            Inspecting::Known(facts) => {
                // Labels and owner included.
                let map = facts.config_map(self.owner, &subject)?;
                self.troubles.extend(self.applier.model(&map, &self.there).await?);
                return Ok(Ok(*facts));
            }
            Inspecting::Sent(errand) => errand,
        };
        match errand {
            Errand::Done { pod } => match ModelFacts::from_log(&self.calls.log(&pod).await?) {
                Ok(facts) => {
                    let map = facts.config_map(self.owner, &subject)?;
                    self.troubles.extend(self.applier.model(&map, &self.there).await?);
                    self.look_soon(SOON);
                    Ok(Ok(facts))
                }
                Err(error) => {
                    self.look_soon(LATER);
                    Ok(Err(PlanState::Refused(error.into())))
                }
            },
            Errand::Start { incarnation, after } => {
                let pod = match inspector(self.owner, &subject, incarnation, &self.context.around) {
                    Ok(pod) => pod,
                    Err(error) => return Ok(Err(PlanState::Refused(invalid_spec(&error)))),
                };
                self.look_soon(LATER);
                match self.applier.pod(pod).await? {
                    Made::Created(pod) => {
                        self.happenings
                            .push(Happening::normal("InspectorStarted", format!("{pod} reads the model")));
                        waiting(after)
                    }
                    Made::Refused(trouble) => waiting(Some(trouble)),
                }
            }
            Errand::Waiting { trouble } => {
                self.look_soon(LATER);
                waiting(trouble)
            }
            Errand::Failed { trouble, retry_at, .. } => {
                self.look_at(retry_at);
                Ok(Err(PlanState::Refused(trouble)))
            }
        }
    }
}

fn invalid_spec(error: &BuildError) -> Trouble {
    Trouble::new("InvalidSpec", format!("spec.model.source: {error}"))
}
