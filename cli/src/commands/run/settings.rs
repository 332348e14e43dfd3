//! Sampling settings that users can change during a session.

use crate::commands::generate::MAX_STOP_STRINGS;
use crate::commands::run::RunArgs;
use crate::flags::{min_p, probability, repetition_penalty, stop_string, temperature};
use crate::output::table;
use remoe_model::GenerationDefaults;

pub(super) const HELP: &str = "\
/set               show the settings
/set NAME VALUE    change a setting: system, max_tokens, temperature, top_p, top_k, min_p,
                   repetition_penalty, seed, stop
/set NAME          reset a setting to its default
/show              show the placement and the settings
/clear             clear the conversation
/help              show this help
/bye               exit, as Ctrl-D

Text between \"\"\" and \"\"\" may span lines; a backslash at the end of a line continues it.
Ctrl-C ends an answer.";

/// Sampling settings of a session.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct SamplingSettings {
    pub(super) system: Option<String>,
    pub(super) max_tokens: Option<u32>,
    pub(super) temperature: f32,
    pub(super) top_p: Option<f32>,
    pub(super) top_k: Option<u32>,
    pub(super) min_p: Option<f32>,
    pub(super) repetition_penalty: Option<f32>,
    pub(super) seed: u64,
    pub(super) stop: Vec<String>,
    /// Values after a reset.
    defaults: ModelSampling,
}

/// Sampling parameters of a model's `generation_config.json`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ModelSampling {
    temperature: f32,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl SamplingSettings {
    /// Creates the settings from flags. Without a flag, a setting is that of `model`, as in the HTTP interface.
    pub(super) fn new(args: &RunArgs, model: &GenerationDefaults) -> Self {
        let defaults = ModelSampling {
            temperature: model.temperature as f32,
            top_p: model.top_p.map(|share| share as f32),
            top_k: model.top_k.map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
            min_p: model.min_p.map(|share| share as f32),
            repetition_penalty: model.repetition_penalty.map(|factor| factor as f32),
        };
        Self {
            system: args.system.clone(),
            max_tokens: args.max_tokens,
            temperature: args.sampling.temperature.unwrap_or(defaults.temperature),
            top_p: args.sampling.top_p.or(defaults.top_p),
            top_k: args.sampling.top_k.or(defaults.top_k),
            min_p: args.sampling.min_p.or(defaults.min_p),
            repetition_penalty: args.sampling.repetition_penalty.or(defaults.repetition_penalty),
            seed: args.sampling.seed,
            stop: Vec::new(),
            defaults,
        }
    }

    /// Sets `NAME VALUE`, or resets `NAME`. Returns the setting with its new value.
    pub(super) fn set(&mut self, text: &str) -> Result<String, String> {
        let (name, value) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let value = Some(value.trim()).filter(|value| !value.is_empty());
        let with_name = |problem: String| format!("invalid {name}: {problem}");
        match name {
            "system" => self.system = value.map(str::to_owned),
            "max_tokens" => self.max_tokens = value.map(at_least_one).transpose().map_err(with_name)?,
            "temperature" => {
                self.temperature =
                    value.map_or(Ok(self.defaults.temperature), temperature).map_err(with_name)?;
            }
            "top_p" => {
                self.top_p = value.map(probability).transpose().map_err(with_name)?.or(self.defaults.top_p)
            }
            "top_k" => {
                self.top_k = value.map(whole_number).transpose().map_err(with_name)?.or(self.defaults.top_k)
            }
            "min_p" => {
                self.min_p = value.map(min_p).transpose().map_err(with_name)?.or(self.defaults.min_p);
            }
            "repetition_penalty" => {
                let factor = value.map(repetition_penalty).transpose().map_err(with_name)?;
                self.repetition_penalty = factor.or(self.defaults.repetition_penalty);
            }
            "seed" => self.seed = value.map_or(Ok(0), whole_number).map_err(with_name)?,
            "stop" => match value {
                None => self.stop.clear(),
                Some(_) if self.stop.len() == MAX_STOP_STRINGS => {
                    return Err(format!("invalid stop: expected at most {MAX_STOP_STRINGS} texts"));
                }
                Some(text) => self.stop.push(stop_string(text).map_err(with_name)?),
            },
            other => return Err(format!("unknown setting {other}; see /help")),
        }
        let current = self.pairs().into_iter().find(|(other, _)| *other == name);
        Ok(current.map_or_else(String::new, |(name, value)| format!("{name}: {value}")))
    }

    pub(super) fn show(&self) -> String {
        table::of_pairs(&self.pairs())
    }

    fn pairs(&self) -> [(&'static str, String); 9] {
        let or = |value: Option<String>, without: &str| value.unwrap_or_else(|| without.to_owned());
        [
            ("system", or(self.system.clone(), "none")),
            ("max_tokens", or(self.max_tokens.map(|limit| limit.to_string()), "rest of the context")),
            ("temperature", self.temperature.to_string()),
            ("top_p", or(self.top_p.map(|share| share.to_string()), "off")),
            ("top_k", or(self.top_k.map(|count| count.to_string()), "off")),
            ("min_p", or(self.min_p.map(|share| share.to_string()), "off")),
            ("repetition_penalty", or(self.repetition_penalty.map(|factor| factor.to_string()), "off")),
            ("seed", self.seed.to_string()),
            ("stop", or(Some(self.stop.join(", ")).filter(|texts| !texts.is_empty()), "none")),
        ]
    }
}

fn whole_number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected a whole number, got {text}"))
}

fn at_least_one(text: &str) -> Result<u32, String> {
    match whole_number(text)? {
        0 => Err("expected 1 or more".to_owned()),
        number => Ok(number),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn settings() -> SamplingSettings {
        SamplingSettings {
            system: None,
            max_tokens: None,
            temperature: 0.0,
            top_p: None,
            top_k: None,
            min_p: None,
            repetition_penalty: None,
            seed: 0,
            stop: Vec::new(),
            defaults: ModelSampling {
                temperature: 0.0,
                top_p: None,
                top_k: None,
                min_p: None,
                repetition_penalty: None,
            },
        }
    }

    #[test]
    fn flags_override_the_models_sampling() {
        let model = GenerationDefaults {
            temperature: 0.7,
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            ..GenerationDefaults::default()
        };
        let of = |flags: &[&str]| {
            let line = [&["remoe", "run", "model"], flags].concat();
            match Cli::try_parse_from(line).unwrap().command {
                Command::Run(args) => SamplingSettings::new(&args, &model),
                other => panic!("{other:?}"),
            }
        };
        let sampling =
            |s: &SamplingSettings| (s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty);
        let mut now = of(&[]);
        assert_eq!(sampling(&now), (0.7, Some(0.9), Some(40), Some(0.05), Some(1.1)));
        let flags = ["--temperature", "0", "--top-k", "0", "--min-p", "0", "--repetition-penalty", "1"];
        assert_eq!(sampling(&of(&flags)), (0.0, Some(0.9), Some(0), Some(0.0), Some(1.0)));
        let sets = ["temperature 0", "top_p 1", "top_k 0", "min_p 0", "repetition_penalty 1"];
        for text in sets.into_iter().chain(["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) {
            assert!(now.set(text).is_ok(), "{text}");
        }
        assert_eq!(now, of(&[]));
    }

    #[test]
    fn setting_is_reported_and_can_be_reset() {
        let mut now = settings();
        for (text, says) in [
            ("temperature 0.7", "temperature: 0.7"),
            ("system Be brief, please.", "system: Be brief, please."),
            ("max_tokens 12", "max_tokens: 12"),
            ("top_p 0.9", "top_p: 0.9"),
            ("top_k 40", "top_k: 40"),
            ("min_p 0.1", "min_p: 0.1"),
            ("repetition_penalty 1.2", "repetition_penalty: 1.2"),
            ("seed 7", "seed: 7"),
            ("stop END", "stop: END"),
            ("stop  then", "stop: END, then"),
        ] {
            assert_eq!(now.set(text).as_deref(), Ok(says));
        }
        for name in [
            "temperature",
            "system",
            "max_tokens",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "seed",
            "stop",
        ] {
            assert!(now.set(name).is_ok());
        }
        assert_eq!(now, settings());
    }

    #[test]
    fn invalid_setting_is_refused_without_a_change() {
        let mut now = settings();
        for text in [
            "temperature 3",
            "temperature x",
            "max_tokens 0",
            "top_p 0",
            "top_k -1",
            "min_p 2",
            "repetition_penalty 0",
            "seed x",
            "colour red",
        ] {
            let name = text.split(' ').next().unwrap_or_default();
            assert!(now.set(text).is_err_and(|problem| problem.contains(name)), "{text}");
        }
        assert_eq!(now, settings());
    }
}
