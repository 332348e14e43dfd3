//! A ledger added up: what was paid, and what for.

use crate::life::FunctionLife;
use crate::meter::is_rival;
use crate::read::LedgerError;
use crate::record::{FunctionEvent, FunctionRecord, Record, RequestRecord};
use crate::share::{Phases, grow};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

const DAY: u64 = 86_400_000_000_000;
/// Names that are told apart, of models, tenants and tiers each: a ledger has fewer.
const NAMES: usize = 10_000;
/// Between two signs of life of one who writes a ledger.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// Why a ledger cannot be added up.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// It cannot be read.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// It has more names than anything real.
    #[error("cannot add up the ledger: expected at most {NAMES} {of}; add up parts of it")]
    TooMany {
        /// Kind of the names.
        of: &'static str,
    },
}

/// Requests and what they cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Amounts {
    /// How many.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Tokens of their answers.
    pub completion_tokens: u64,
    /// Nano-dollars.
    pub cost: u64,
}

impl AddAssign for Amounts {
    fn add_assign(&mut self, other: Self) {
        grow(&mut self.requests, other.requests);
        grow(&mut self.prompt_tokens, other.prompt_tokens);
        grow(&mut self.completion_tokens, other.completion_tokens);
        grow(&mut self.cost, other.cost);
    }
}

/// Where the money for the functions of one tier went, in nano-dollars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Tier {
    /// For prompts that were answered.
    pub prefill: u64,
    /// For answers.
    pub decode: u64,
    /// For being there.
    pub idle: u64,
}

/// The functions of one model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Functions {
    /// Nano-dollars that their time cost.
    pub paid: u64,
    /// Part of `paid` in which they served and had nothing to do.
    pub idle: u64,
    /// Functions that are alive at the end.
    pub alive: u64,
    /// Nano-dollars that the functions in `alive` cost in an hour.
    pub per_hour: u64,
}

/// A ledger added up; money in nano-dollars.
///
/// `paid` + `unknown` = `answered.cost` + `earlier` + `failed` + `idle` + `cold_start` + `overlap` + `overhead` +
/// `residual`.
///
/// If the oldest files of the ledger were removed, that is the sum of what is left: its requests, and the functions
/// that were alive when it begins, from their starts on.
#[derive(Debug, Clone, Default)]
pub struct LedgerTotals {
    /// Requests that were answered.
    pub answered: Amounts,
    /// Time of functions by their price, and the overhead.
    pub paid: u64,
    /// Work without a delivered answer, and work in progress.
    pub failed: u64,
    /// Functions that serve and have nothing to do.
    pub idle: u64,
    /// Functions that do not serve yet.
    pub cold_start: u64,
    /// Functions in whose place others serve already.
    pub overlap: u64,
    /// Gateway and launcher.
    pub overhead: u64,
    /// Difference of what was paid and the sum of the parts; negative if the parts are more.
    pub residual: i64,
    /// Requests of these functions whose records are gone: in files that were removed, or that could not be written.
    pub earlier: u64,
    /// Charges to requests for functions whose start is not in the ledger: it lacks its beginning.
    pub unknown: u64,
    /// Requests without an answer.
    pub lost: u64,
    /// Requests by model.
    pub by_model: BTreeMap<String, Amounts>,
    /// Functions by model: all of [`Self::paid`] but the overhead. A model without a name has those of which a ledger of an
    /// earlier release does not say whose they are.
    pub functions_by_model: BTreeMap<String, Functions>,
    /// By tenant.
    pub by_tenant: BTreeMap<String, Amounts>,
    /// By day, as days since 1970 in UTC.
    pub by_day: BTreeMap<u64, Amounts>,
    /// By tier.
    pub by_tier: BTreeMap<String, Tier>,
    /// Counterfactual cost of requests, beside what those requests did cost, by the rival's name.
    pub rivals: BTreeMap<String, (u64, u64)>,
    /// Functions that are alive at the end, and what they cost in an hour together.
    pub alive: u64,
    /// See [`Self::alive`].
    pub per_hour: u64,
    /// Nanoseconds that functions may have lived longer than they were paid for, all together: their end is not
    /// recorded, and the last sign of life was taken for it.
    pub estimated: u64,
    /// Where the prices stand, as the last one who wrote the ledger said.
    pub prices: String,
    /// Times of the first and the last record.
    pub span: Option<(u64, u64)>,
    /// Functions by name.
    lives: BTreeMap<String, UnsettledFunction>,
    /// Functions are added up at the end alone: other ledgers have them too.
    is_part: bool,
}

/// A function that is not added up yet.
#[derive(Debug, Clone)]
struct UnsettledFunction {
    /// Whose it is.
    model: String,
    tier: String,
    life: FunctionLife,
}

impl LedgerTotals {
    /// Adds `records` up, oldest first. Those of the last writer are added up until its last sign of life.
    ///
    /// # Errors
    /// The ledger cannot be read, or is none of a real deployment.
    pub fn of(records: impl Iterator<Item = Result<Record, LedgerError>>) -> Result<Self, AccountError> {
        let mut account = Self::default();
        for record in records {
            account.add(&record?)?;
        }
        let end = account.span.map_or(0, |(_, last)| last);
        Ok(account.until(end))
    }

    /// Adds several ledgers up, as gateways write them whose functions are the same: each function counts once. Each is
    /// oldest first. Functions without a recorded end are alive until the last record of all, or until the last record
    /// of the ledgers that know them if these have fallen silent.
    ///
    /// # Errors
    /// As those of [`Self::of`].
    pub fn of_several<Records>(ledgers: impl Iterator<Item = Records>) -> Result<Self, AccountError>
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
        let mut whole = Self::default();
        for mut part in parts {
            part.silent_before(end);
            whole.join(part)?;
        }
        Ok(whole.until(end))
    }

    /// One whose writer has given no sign of life for two of them before `end` knows of no function that lives on.
    fn silent_before(&mut self, end: u64) {
        let Some((_, last)) = self.span else { return };
        if end.saturating_sub(last) > 2 * SIGN_OF_LIFE.as_nanos() as u64 {
            self.unobserved_since(last);
        }
    }

    fn unobserved_since(&mut self, last: u64) {
        for UnsettledFunction { life, .. } in self.lives.values_mut() {
            life.unseen = life.unseen.or(Some(last));
        }
    }

    fn join(&mut self, other: Self) -> Result<(), AccountError> {
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
        for (name, (cost, here)) in &other.rivals {
            self.compare(name, *cost, *here);
        }
        self.prices = other.prices;
        let spans = self.span.into_iter().chain(other.span);
        self.span = spans.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
        for (function, known) in other.lives {
            match self.lives.get_mut(&function) {
                Some(here) => here.life.join(known.life),
                None => drop(self.lives.insert(function, known)),
            }
        }
        Ok(())
    }

    /// With all functions added up that are alive at `end`, in nanoseconds since 1970.
    #[must_use]
    pub fn until(mut self, end: u64) -> Self {
        self.settle(end, |_| true);
        self
    }

    /// Returns the records that a new file begins with, as of `at`, so that it adds up without the files before it.
    pub(crate) fn carried(&self, at: u64) -> impl Iterator<Item = Record> {
        // It says nothing that was not known by then.
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

    /// Adds the next record; functions that have not stopped are left for [`Self::until`].
    ///
    /// # Errors
    /// The ledger has more names than anything real; the record is not added.
    pub fn add(&mut self, record: &Record) -> Result<(), AccountError> {
        let at = record.at();
        let (_, last) = *self.span.get_or_insert((at, at));
        match record {
            // Functions that are not named again have ended since, or in a file that is missing.
            Record::Opened { prices, .. } | Record::Continued { prices, .. } => {
                self.unobserved_since(last);
                self.prices.clone_from(prices);
            }
            Record::Carried { model, function, tier, life, .. } => {
                entry(&mut self.by_tier, tier, "tiers")?;
                entry(&mut self.functions_by_model, model, "models")?;
                let known =
                    UnsettledFunction { model: model.clone(), tier: tier.clone(), life: life.clone() };
                let known = self.lives.insert(function.clone(), known);
                grow(&mut self.earlier, life.told.saturating_sub(known.map_or(0, |known| known.life.told)));
            }
            Record::Request(request) => self.request(request)?,
            Record::Function(function) => self.function(function)?,
            Record::Lost { at, since, function, .. } => {
                self.lost += 1;
                if let Some(UnsettledFunction { life, .. }) = self.lives.get_mut(started_function(function)) {
                    life.lose(*since, *at);
                }
            }
            Record::Alive { at, overhead } => {
                // Answers follow the end of their function closely.
                let long_ago = at.saturating_sub(SIGN_OF_LIFE.as_nanos() as u64);
                let is_over = |life: &FunctionLife| {
                    life.unseen.is_some() || life.stopped.is_some_and(|stopped| stopped < long_ago)
                };
                if !self.is_part {
                    self.settle(*at, is_over);
                }
                grow(&mut self.overhead, *overhead);
                grow(&mut self.paid, *overhead);
            }
        }
        // Records of several requests are written in another order than they were made in.
        self.span = self.span.map(|(first, last)| (first, last.max(at)));
        Ok(())
    }

    fn request(&mut self, request: &RequestRecord) -> Result<(), AccountError> {
        let amounts = Amounts {
            requests: 1,
            prompt_tokens: request.prompt_tokens,
            completion_tokens: request.completion_tokens,
            cost: request.total(),
        };
        self.answered += amounts;
        *entry(&mut self.by_model, &request.model, "models")? += amounts;
        *entry(&mut self.by_tenant, &request.tenant, "tenants")? += amounts;
        *self.by_day.entry(request.at / DAY).or_default() += amounts;
        for (rival, cost) in &request.rivals {
            self.compare(rival, *cost, amounts.cost);
        }
        for (function, share) in &request.shares {
            let Phases { prefill, decode } = share.cost;
            let tier = entry(&mut self.by_tier, &share.tier, "tiers")?;
            grow(&mut tier.prefill, prefill);
            grow(&mut tier.decode, decode);
            match self.lives.get_mut(function) {
                Some(known) => known.life.answered(&request.function, request.at, share, request.served),
                None => grow(&mut self.unknown, share.cost.sum()),
            }
        }
        Ok(())
    }

    /// Adds what requests would have `cost` as `rival` serves them, and did cost `here`. Ledgers of earlier releases have
    /// whatever names main functions told: those are left out.
    fn compare(&mut self, rival: &str, cost: u64, here: u64) {
        if !is_rival(rival) {
            return;
        }
        let sums = self.rivals.entry(rival.to_owned()).or_default();
        grow(&mut sums.0, cost);
        grow(&mut sums.1, here);
    }

    fn function(&mut self, record: &FunctionRecord) -> Result<(), AccountError> {
        let FunctionRecord { at, model, function, event } = record;
        entry(&mut self.functions_by_model, model, "models")?;
        if let FunctionEvent::Started { tier, rate, basis } = event {
            match self.lives.get_mut(function) {
                Some(known) => {
                    known.life.unseen = None;
                    // An earlier release carried functions on without saying whose they are.
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
        // One that the ledger does not know started before its beginning, which it lacks.
        let Some(UnsettledFunction { life, .. }) = self.lives.get_mut(function) else { return Ok(()) };
        let step = match event {
            FunctionEvent::Serving => &mut life.serving,
            FunctionEvent::Replaced => &mut life.replaced,
            FunctionEvent::Stopped | FunctionEvent::Started { .. } => &mut life.stopped,
        };
        step.get_or_insert(*at);
        Ok(())
    }

    /// Adds the functions up that `are_over`; those without an end lived until `end`, or for all that is known until
    /// they were last seen.
    fn settle(&mut self, end: u64, are_over: impl Fn(&FunctionLife) -> bool) {
        let (over, going): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.lives).into_iter().partition(|(_, known)| are_over(&known.life));
        self.lives = going;
        for UnsettledFunction { model, tier, life } in over.into_values() {
            let functions = self.functions_by_model.entry(model).or_default();
            if life.stopped.is_none() {
                if life.unseen.is_some() {
                    self.estimated += SIGN_OF_LIFE.as_nanos() as u64;
                } else {
                    self.alive += 1;
                    grow(&mut self.per_hour, life.rate.0);
                    functions.alive += 1;
                    grow(&mut functions.per_hour, life.rate.0);
                }
            }
            let spent = life.spent(end);
            grow(&mut functions.paid, spent.paid);
            grow(&mut functions.idle, spent.idle);
            grow(&mut self.paid, spent.paid);
            grow(&mut self.failed, spent.failed);
            grow(&mut self.idle, spent.idle);
            grow(&mut self.cold_start, spent.cold_start);
            grow(&mut self.overlap, spent.overlap);
            self.residual = self.residual.saturating_add(spent.residual);
            grow(&mut self.by_tier.entry(tier).or_default().idle, spent.idle);
        }
    }

    /// Share of what was paid that the residual is, together with what was charged but not paid for.
    #[must_use]
    pub fn residual_share(&self) -> f64 {
        match (self.residual.unsigned_abs().saturating_add(self.unknown), self.paid) {
            (0, _) => 0.0,
            (missing, paid) => missing as f64 / paid.max(missing) as f64,
        }
    }
}

/// The name under which a main function was said to start that answers as `function`: one whose process was started
/// again in its place is `NAME#1`, and counts its work from 0.
fn started_function(function: &str) -> &str {
    function.split_once('#').map_or(function, |(name, _)| name)
}

fn entry<'a, T: Default>(
    map: &'a mut BTreeMap<String, T>,
    name: &str,
    of: &'static str,
) -> Result<&'a mut T, AccountError> {
    // Most names are there already, and need no copy.
    if !map.contains_key(name) {
        if map.len() == NAMES {
            return Err(AccountError::TooMany { of });
        }
        map.insert(name.to_owned(), T::default());
    }
    map.get_mut(name).ok_or(AccountError::TooMany { of })
}
