//! Totals of a ledger: what was paid for functions, and the parts of that.

use crate::life::FunctionLife;
use crate::meter::is_rival;
use crate::read::LedgerError;
use crate::record::{FunctionEvent, FunctionRecord, Record, RequestRecord};
use crate::share::{Phases, grow};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

const DAY_NANOSECONDS: u64 = 86_400_000_000_000;
/// Largest number of different models, of tenants, and of tiers in a ledger. Real ledgers have fewer.
const MAX_NAMES: usize = 10_000;
/// Time between two signs of life of a ledger's writer.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// Reason why a ledger cannot be added up.
#[derive(Debug, thiserror::Error)]
pub enum LedgerTotalsError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The ledger has too many different names.
    #[error("cannot add up the ledger: expected at most {MAX_NAMES} {of}; add up parts of it")]
    TooMany {
        /// Kind of the names.
        of: &'static str,
    },
}

/// Number, tokens and cost of requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RequestTotals {
    /// Number of requests.
    pub requests: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Completion tokens.
    pub completion_tokens: u64,
    /// Cost in nano-dollars.
    pub cost: u64,
}

impl AddAssign for RequestTotals {
    fn add_assign(&mut self, other: Self) {
        grow(&mut self.requests, other.requests);
        grow(&mut self.prompt_tokens, other.prompt_tokens);
        grow(&mut self.completion_tokens, other.completion_tokens);
        grow(&mut self.cost, other.cost);
    }
}

/// Costs of the functions of one tier, in nano-dollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TierTotals {
    /// Charged to answered requests for prefill.
    pub prefill: u64,
    /// Charged to answered requests for decode.
    pub decode: u64,
    /// Idle time.
    pub idle: u64,
}

/// Costs of the functions of one model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct FunctionTotals {
    /// Cost of their time in nano-dollars.
    pub paid: u64,
    /// Part of `paid` for time in which they were idle while they served.
    pub idle: u64,
    /// Number of functions that are alive at the end.
    pub alive: u64,
    /// Price of the living functions, in nano-dollars per hour.
    pub per_hour: u64,
}

/// Totals of a ledger, in nano-dollars.
///
/// `paid` + `unknown` = `answered.cost` + `earlier` + `failed` + `idle` + `cold_start` + `overlap` + `overhead` +
/// `residual`.
///
/// If the oldest files of the ledger were removed, these are the totals of the rest: its requests, and the functions
/// that were alive when it begins, each from its start on.
#[derive(Debug, Clone, Default)]
pub struct LedgerTotals {
    /// Answered requests.
    pub answered: RequestTotals,
    /// Cost of all function time, and of the overhead.
    pub paid: u64,
    /// Cost of work without a delivered answer, and of work in progress.
    pub failed: u64,
    /// Cost of functions that serve and are idle.
    pub idle: u64,
    /// Cost of functions that have started and do not serve yet.
    pub cold_start: u64,
    /// Cost of functions that are still alive while others serve in their place.
    pub overlap: u64,
    /// Cost of gateway and launcher.
    pub overhead: u64,
    /// Paid amount minus the sum of the parts. Negative if the parts are more.
    pub residual: i64,
    /// Charges to requests whose records are missing: their files were removed or could not be written.
    pub earlier: u64,
    /// Charges to requests for functions whose start is not in the ledger, because its beginning is missing.
    pub unknown: u64,
    /// Number of requests without an answer.
    pub lost: u64,
    /// Requests by model.
    pub by_model: BTreeMap<String, RequestTotals>,
    /// Costs of functions by model: [`Self::paid`] without the overhead. Ledgers of earlier releases may not name the
    /// model; those functions are under the empty name.
    pub functions_by_model: BTreeMap<String, FunctionTotals>,
    /// Requests by tenant.
    pub by_tenant: BTreeMap<String, RequestTotals>,
    /// Requests by day, in days since 1970 (UTC).
    pub by_day: BTreeMap<u64, RequestTotals>,
    /// Costs of functions by tier.
    pub by_tier: BTreeMap<String, TierTotals>,
    /// Counterfactual cost and actual cost of the compared requests, by the name of the counterfactual.
    pub rivals: BTreeMap<String, (u64, u64)>,
    /// Number of functions that are alive at the end.
    pub alive: u64,
    /// Price of the living functions, in nano-dollars per hour.
    pub per_hour: u64,
    /// Nanoseconds by which functions may have lived longer than counted: if an end is not recorded, the last sign of
    /// life is taken for it.
    pub estimated: u64,
    /// Source of the prices, as the last writer stated it.
    pub prices: String,
    /// Times of the first and the last record, in nanoseconds since 1970.
    pub span: Option<(u64, u64)>,
    /// Functions that are not added up yet, by name.
    lives: BTreeMap<String, UnsettledFunction>,
    /// Set if other ledgers have the same functions. They are then added up only after all ledgers are joined.
    is_part: bool,
}

/// Function that is not added up yet.
#[derive(Debug, Clone)]
struct UnsettledFunction {
    model: String,
    tier: String,
    life: FunctionLife,
}

impl LedgerTotals {
    /// Adds up `records`, oldest first. Functions of the last writer count until its last sign of life.
    ///
    /// # Errors
    /// The ledger cannot be read, or has too many different names.
    pub fn from_records(
        records: impl Iterator<Item = Result<Record, LedgerError>>,
    ) -> Result<Self, LedgerTotalsError> {
        let mut totals = Self::default();
        for record in records {
            totals.add(&record?)?;
        }
        let end = totals.span.map_or(0, |(_, last)| last);
        Ok(totals.until(end))
    }

    /// Adds up the ledgers of several gateways to the same functions; each function counts once. Records of each
    /// ledger come oldest first. A function without a recorded end is alive until the last record of all ledgers. If
    /// the writers of all ledgers that have it fell silent before, it is alive until their last record.
    ///
    /// # Errors
    /// As [`Self::from_records`].
    pub fn from_ledgers<Records>(ledgers: impl Iterator<Item = Records>) -> Result<Self, LedgerTotalsError>
    where
        Records: Iterator<Item = Result<Record, LedgerError>>,
    {
        let mut parts = Vec::new();
        for records in ledgers {
            let mut part = Self { is_part: true, ..Self::default() };
            for record in records {
                part.add(&record?)?;
            }
            parts.push(part);
        }
        let end = parts.iter().filter_map(|part| part.span).map(|(_, last)| last).max().unwrap_or(0);
        let mut totals = Self::default();
        for mut part in parts {
            part.end_observation_if_silent(end);
            totals.join(part)?;
        }
        Ok(totals.until(end))
    }

    /// If the writer gave no sign of life in the last two intervals before `end`, marks all functions as unobserved
    /// since its last record.
    fn end_observation_if_silent(&mut self, end: u64) {
        let Some((_, last)) = self.span else { return };
        if end.saturating_sub(last) > 2 * SIGN_OF_LIFE.as_nanos() as u64 {
            self.mark_unobserved(last);
        }
    }

    fn mark_unobserved(&mut self, last: u64) {
        for UnsettledFunction { life, .. } in self.lives.values_mut() {
            life.unobserved_since = life.unobserved_since.or(Some(last));
        }
    }

    fn join(&mut self, other: Self) -> Result<(), LedgerTotalsError> {
        self.answered += other.answered;
        grow(&mut self.paid, other.paid);
        grow(&mut self.overhead, other.overhead);
        grow(&mut self.earlier, other.earlier);
        grow(&mut self.unknown, other.unknown);
        self.lost += other.lost;
        for (name, amounts) in &other.by_model {
            *entry(&mut self.by_model, name, "models")? += *amounts;
        }
        for name in other.functions_by_model.keys() {
            entry(&mut self.functions_by_model, name, "models")?;
        }
        for (name, amounts) in &other.by_tenant {
            *entry(&mut self.by_tenant, name, "tenants")? += *amounts;
        }
        for (day, amounts) in other.by_day {
            *self.by_day.entry(day).or_default() += amounts;
        }
        for (name, tier) in &other.by_tier {
            let sum = entry(&mut self.by_tier, name, "tiers")?;
            grow(&mut sum.prefill, tier.prefill);
            grow(&mut sum.decode, tier.decode);
        }
        for (name, (counterfactual, actual)) in &other.rivals {
            self.compare(name, *counterfactual, *actual);
        }
        self.prices = other.prices;
        let spans = self.span.into_iter().chain(other.span);
        self.span = spans.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
        for (function, known) in other.lives {
            match self.lives.get_mut(&function) {
                Some(own) => own.life.join(known.life),
                None => drop(self.lives.insert(function, known)),
            }
        }
        Ok(())
    }

    /// Adds up all functions, those that are alive until `end`, in nanoseconds since 1970.
    #[must_use]
    pub fn until(mut self, end: u64) -> Self {
        self.settle(end, |_| true);
        self
    }

    /// Returns the records with which a new file begins at `at`, so that it can be added up without the files before
    /// it.
    pub(crate) fn carried_records(&self, at: u64) -> impl Iterator<Item = Record> {
        // The records describe the state after the last record before them.
        let at = self.span.map_or(at, |(_, last)| last);
        let lives = self.lives.iter().map(move |(function, known)| Record::Carried {
            at,
            model: known.model.clone(),
            function: function.clone(),
            tier: known.tier.clone(),
            life: known.life.clone(),
        });
        std::iter::once(Record::Continued { at, prices: self.prices.clone() }).chain(lives)
    }

    /// Adds the next record. Functions that have not stopped are added up by [`Self::until`].
    ///
    /// # Errors
    /// The ledger has too many different names. The record is not added.
    pub fn add(&mut self, record: &Record) -> Result<(), LedgerTotalsError> {
        let at = record.at();
        let (_, last) = *self.span.get_or_insert((at, at));
        match record {
            // Functions that are not named again have ended meanwhile, or in a missing file.
            Record::Opened { prices, .. } | Record::Continued { prices, .. } => {
                self.mark_unobserved(last);
                self.prices.clone_from(prices);
            }
            Record::Carried { model, function, tier, life, .. } => {
                entry(&mut self.by_tier, tier, "tiers")?;
                entry(&mut self.functions_by_model, model, "models")?;
                let known =
                    UnsettledFunction { model: model.clone(), tier: tier.clone(), life: life.clone() };
                let known = self.lives.insert(function.clone(), known);
                grow(
                    &mut self.earlier,
                    life.charged.saturating_sub(known.map_or(0, |known| known.life.charged)),
                );
            }
            Record::Request(request) => self.add_request(request)?,
            Record::Function(function) => self.add_function_event(function)?,
            Record::Lost { at, since, function, .. } => {
                self.lost += 1;
                if let Some(UnsettledFunction { life, .. }) = self.lives.get_mut(name_at_start(function)) {
                    life.add_lost_request(*since, *at);
                }
            }
            Record::Alive { at, overhead } => {
                // Late answers of a stopped function arrive within one interval.
                let settled_before = at.saturating_sub(SIGN_OF_LIFE.as_nanos() as u64);
                let is_final = |life: &FunctionLife| {
                    life.unobserved_since.is_some()
                        || life.stopped.is_some_and(|stopped| stopped < settled_before)
                };
                if !self.is_part {
                    self.settle(*at, is_final);
                }
                grow(&mut self.overhead, *overhead);
                grow(&mut self.paid, *overhead);
            }
        }
        // Records may be written in another order than that of their times.
        self.span = self.span.map(|(first, last)| (first, last.max(at)));
        Ok(())
    }

    fn add_request(&mut self, request: &RequestRecord) -> Result<(), LedgerTotalsError> {
        let amounts = RequestTotals {
            requests: 1,
            prompt_tokens: request.prompt_tokens,
            completion_tokens: request.completion_tokens,
            cost: request.total(),
        };
        self.answered += amounts;
        *entry(&mut self.by_model, &request.model, "models")? += amounts;
        *entry(&mut self.by_tenant, &request.tenant, "tenants")? += amounts;
        *self.by_day.entry(request.at / DAY_NANOSECONDS).or_default() += amounts;
        for (rival, cost) in &request.rivals {
            self.compare(rival, *cost, amounts.cost);
        }
        for (function, share) in &request.shares {
            let Phases { prefill, decode } = share.cost;
            let tier = entry(&mut self.by_tier, &share.tier, "tiers")?;
            grow(&mut tier.prefill, prefill);
            grow(&mut tier.decode, decode);
            match self.lives.get_mut(function) {
                Some(known) => known.life.add_answer(&request.function, request.at, share, request.served),
                None => grow(&mut self.unknown, share.cost.sum()),
            }
        }
        Ok(())
    }

    /// Adds the `counterfactual` and the `actual` cost of requests for `rival`. Unknown names, which ledgers of
    /// earlier releases may have, are left out.
    fn compare(&mut self, rival: &str, counterfactual: u64, actual: u64) {
        if !is_rival(rival) {
            return;
        }
        let sums = self.rivals.entry(rival.to_owned()).or_default();
        grow(&mut sums.0, counterfactual);
        grow(&mut sums.1, actual);
    }

    fn add_function_event(&mut self, record: &FunctionRecord) -> Result<(), LedgerTotalsError> {
        let FunctionRecord { at, model, function, event } = record;
        entry(&mut self.functions_by_model, model, "models")?;
        if let FunctionEvent::Started { tier, rate, basis } = event {
            match self.lives.get_mut(function) {
                Some(known) => {
                    known.life.unobserved_since = None;
                    // Carried records of earlier releases do not name the model.
                    known.model.clone_from(model);
                }
                None => {
                    entry(&mut self.by_tier, tier, "tiers")?;
                    let life = FunctionLife::started(*at, *rate, tier == "main", *basis);
                    let known = UnsettledFunction { model: model.clone(), tier: tier.clone(), life };
                    self.lives.insert(function.clone(), known);
                }
            }
            return Ok(());
        }
        // A function that is not known started in a part of the ledger that is missing.
        let Some(UnsettledFunction { life, .. }) = self.lives.get_mut(function) else { return Ok(()) };
        let step = match event {
            FunctionEvent::Serving => &mut life.serving,
            FunctionEvent::Replaced => &mut life.replaced,
            FunctionEvent::Stopped | FunctionEvent::Started { .. } => &mut life.stopped,
        };
        step.get_or_insert(*at);
        Ok(())
    }

    /// Adds up the functions for which `is_settled` returns true. Functions without a recorded end count until `end`,
    /// or until they were last observed.
    fn settle(&mut self, end: u64, is_settled: impl Fn(&FunctionLife) -> bool) {
        let (settled, rest): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.lives).into_iter().partition(|(_, known)| is_settled(&known.life));
        self.lives = rest;
        for UnsettledFunction { model, tier, life } in settled.into_values() {
            let functions = self.functions_by_model.entry(model).or_default();
            if life.stopped.is_none() {
                if life.unobserved_since.is_some() {
                    self.estimated += SIGN_OF_LIFE.as_nanos() as u64;
                } else {
                    self.alive += 1;
                    grow(&mut self.per_hour, life.rate.0);
                    functions.alive += 1;
                    grow(&mut functions.per_hour, life.rate.0);
                }
            }
            let costs = life.costs_until(end);
            grow(&mut functions.paid, costs.paid);
            grow(&mut functions.idle, costs.idle);
            grow(&mut self.paid, costs.paid);
            grow(&mut self.failed, costs.failed);
            grow(&mut self.idle, costs.idle);
            grow(&mut self.cold_start, costs.cold_start);
            grow(&mut self.overlap, costs.overlap);
            self.residual = self.residual.saturating_add(costs.residual);
            grow(&mut self.by_tier.entry(tier).or_default().idle, costs.idle);
        }
    }

    /// Returns the share of `paid` that is not explained: the absolute residual, and charges for unknown functions.
    #[must_use]
    pub fn residual_share(&self) -> f64 {
        match (self.residual.unsigned_abs().saturating_add(self.unknown), self.paid) {
            (0, _) => 0.0,
            (missing, paid) => missing as f64 / paid.max(missing) as f64,
        }
    }
}

/// Returns the name with which the start of `function` was recorded. A restarted main function answers as `NAME#1`,
/// because it counts its work from 0 again.
fn name_at_start(function: &str) -> &str {
    function.split_once('#').map_or(function, |(name, _)| name)
}

/// Returns the entry of `name` in `map`, a new one if needed. `kind` names the entries in the error.
///
/// # Errors
/// The map has [`MAX_NAMES`] entries.
fn entry<'a, T: Default>(
    map: &'a mut BTreeMap<String, T>,
    name: &str,
    kind: &'static str,
) -> Result<&'a mut T, LedgerTotalsError> {
    // Avoids a copy of the name in the usual case.
    if !map.contains_key(name) {
        if map.len() == MAX_NAMES {
            return Err(LedgerTotalsError::TooMany { of: kind });
        }
        map.insert(name.to_owned(), T::default());
    }
    map.get_mut(name).ok_or(LedgerTotalsError::TooMany { of: kind })
}
