//! Requests that share iterations, and requests that share a beginning.

use super::expected::{reference_of, references};
use super::function::{FunctionSettings, Main, RemoteFunction, half, of};
use super::{DeviceArgs, Outcome};
use crate::error::Result;

/// Tokens of a prompt that shares its beginning: several pages.
const SHARED: usize = 64;
const ANSWER: u32 = 12;

/// All prompts of a model at the same time get the tokens that they get alone, with half of the experts remote.
pub(super) async fn mixed(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let few: Vec<_> = references(args)?
        .into_iter()
        .filter(|reference| reference.name.ends_with("-basic") || args.small)
        .collect();
    for reference in &few {
        let settings = FunctionSettings::of("float32");
        let experts = half(&reference.folder)?;
        let mut main = Main::start(args, &reference.folder, &settings).await?;
        let remote = RemoteFunction::start(args, &reference.folder, &experts, &settings)?;
        main.route(&[&remote], &experts).await?;
        let prompts = &reference.expected.prompts;
        let before = main.metric("remoe_iterations_total")?;
        let mut answers = Vec::new();
        for prompt in prompts {
            answers.push(main.begin(&prompt.ids, prompt.greedy.len() as u32).await?);
        }
        for (answer, prompt) in answers.into_iter().zip(prompts) {
            let tokens = answer.finished().await?.tokens;
            outcome.require(tokens == prompt.greedy, || {
                of(&reference.name, format!("a batch changes the tokens after {:?}: {tokens:?}", prompt.ids))
            });
        }
        let iterations = main.metric("remoe_iterations_total")? - before;
        let alone: usize = prompts.iter().map(|prompt| prompt.greedy.len()).sum();
        outcome.require(iterations < alone as f64, || {
            of(
                &reference.name,
                format!("{iterations} iterations for {alone} tokens: requests did not share any"),
            )
        });
    }
    outcome.require(!few.is_empty(), || "no reference model".to_owned());
    outcome.figure("models", few.len());
    Ok(outcome)
}

/// A prompt that was computed before is not computed again, and its answer stays.
pub(super) async fn prefix(args: &DeviceArgs) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for name in ["olmoe-basic", "dsv2-basic", "gptoss-basic"] {
        let reference = reference_of(args, name)?;
        let mut main = Main::start(args, &reference.folder, &FunctionSettings::of("float32")).await?;
        main.route(&[], &[]).await?;
        let seeds = reference.expected.prompts.iter().flat_map(|prompt| prompt.ids.iter().copied());
        let ids: Vec<u32> = seeds.collect::<Vec<_>>().into_iter().cycle().take(SHARED).collect();
        let first = main.generate(&ids, ANSWER).await?;
        let again = main.generate(&ids, ANSWER).await?;
        outcome.require(first.tokens == again.tokens, || {
            of(name, format!("{:?} with a computed prefix, {:?} without", again.tokens, first.tokens))
        });
        let saved = first.forwarded_positions.saturating_sub(again.forwarded_positions);
        outcome.require(saved >= SHARED as u64 / 2, || {
            of(name, format!("{saved} of {SHARED} positions reused"))
        });
        outcome.figure(&format!("{name}_reused"), saved);
    }
    Ok(outcome)
}
