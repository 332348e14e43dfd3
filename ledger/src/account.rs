//! A ledger added up: what was paid, and what for.

use crate::life::Life;
use crate::read::LedgerError;
use crate::record::{FunctionEvent, FunctionRecord, Phases, Record, RequestRecord};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

const DAY: u64 = 86_400_000_000_000;
/// Names that are told apart, of models, tenants, tiers and rivals each: a ledger has fewer.
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
    #[error("the ledger names more than {NAMES} {of}; add up parts of it")]
    TooMany {
        /// What it has too many of.
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
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cost += other.cost;
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

/// A ledger added up; money in nano-dollars.
///
/// `paid` = `answered.cost` + `failed` + `idle` + `cold_start` + `overlap` + `overhead` + `residual`.
#[derive(Debug, Clone, Default)]
pub struct Account {
    /// Requests that were answered.
    pub answered: Amounts,
    /// Time of functions by their price, and the overhead.
    pub paid: u64,
    /// Work whose answer nobody got, and work in progress.
    pub failed: u64,
    /// Functions that serve and have nothing to do.
    pub idle: u64,
    /// Functions that do not serve yet.
    pub cold_start: u64,
    /// Functions in whose place others serve already.
    pub overlap: u64,
    /// Gateway and launcher.
    pub overhead: u64,
    /// What the parts lack of what was paid, or have too much.
    pub residual: i64,
    /// Requests without an answer.
    pub lost: u64,
    /// By model.
    pub by_model: BTreeMap<String, Amounts>,
    /// By tenant.
    pub by_tenant: BTreeMap<String, Amounts>,
    /// By day, as days since 1970 in UTC.
    pub by_day: BTreeMap<u64, Amounts>,
    /// By tier.
    pub by_tier: BTreeMap<String, Tier>,
    /// What requests would have cost elsewhere, beside what those requests did cost, by the rival's name.
    pub rivals: BTreeMap<String, (u64, u64)>,
    /// Functions that are alive at the end, and what they cost in an hour together.
    pub alive: u64,
    /// See [`Self::alive`].
    pub per_hour: u64,
    /// Nanoseconds that functions may have lived longer than they were paid for, all together: nobody saw their end,
    /// and the last sign of life was taken for it.
    pub estimated: u64,
    /// Where the prices stand, as the last one who wrote the ledger said.
    pub prices: String,
    /// Times of the first and the last record.
    pub span: Option<(u64, u64)>,
    lives: BTreeMap<String, (String, Life)>,
}

impl Account {
    /// Adds `records` up, oldest first. Those of the last writer are added up until its last sign of life.
    ///
    /// # Errors
    /// The ledger cannot be read, or is none of a real deployment.
    pub fn of(records: impl Iterator<Item = Result<Record, LedgerError>>) -> Result<Self, AccountError> {
        let mut account = Self::default();
        for record in records {
            account.add(record?)?;
        }
        let end = account.span.map_or(0, |(_, last)| last);
        Ok(account.until(end))
    }

    /// With all functions added up that are alive at `end`, in nanoseconds since 1970.
    #[must_use]
    pub fn until(mut self, end: u64) -> Self {
        self.settle(end, |_| true, false);
        self
    }

    /// Adds the next record; functions that have not stopped are left for [`Self::until`].
    ///
    /// # Errors
    /// The ledger has more names than anything real; the record is not added.
    pub fn add(&mut self, record: Record) -> Result<(), AccountError> {
        let at = record.at();
        if let Record::Opened { prices, .. } = record {
            let last = self.span.map_or(at, |(_, last)| last);
            self.settle(last, |_| true, true);
            self.prices = prices;
            self.span.get_or_insert((at, at)).1 = at;
            return Ok(());
        }
        let last = self.span.get_or_insert((at, at));
        last.1 = last.1.max(at);
        match record {
            Record::Opened { .. } => {}
            Record::Request(request) => self.request(&request)?,
            Record::Function(function) => self.function(function)?,
            Record::Lost { at, since, function, .. } => {
                self.lost += 1;
                if let Some((_, life)) = self.lives.get_mut(&function) {
                    life.lose(since, at);
                }
            }
            Record::Alive { overhead, .. } => {
                // Answers follow the end of their function closely.
                let long_ago = at.saturating_sub(SIGN_OF_LIFE.as_nanos() as u64);
                self.settle(at, |life| life.stopped.is_some_and(|stopped| stopped < long_ago), false);
                self.overhead += overhead;
                self.paid += overhead;
            }
        }
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
            let (sum, here) = entry(&mut self.rivals, rival, "rivals")?;
            *sum += cost;
            *here += amounts.cost;
        }
        for (function, share) in &request.shares {
            let Phases { prefill, decode } = share.cost;
            let tier = entry(&mut self.by_tier, &share.tier, "tiers")?;
            tier.prefill += prefill;
            tier.decode += decode;
            if let Some((_, life)) = self.lives.get_mut(function) {
                life.answered(&request.function, request.at, share, request.served);
            }
        }
        Ok(())
    }

    fn function(&mut self, record: FunctionRecord) -> Result<(), AccountError> {
        let FunctionRecord { at, function, event, .. } = record;
        if let FunctionEvent::Started { tier, rate, basis } = event {
            entry(&mut self.by_tier, &tier, "tiers")?;
            let life = Life::started(at, rate, tier == "main", basis);
            self.lives.insert(function, (tier, life));
            return Ok(());
        }
        // One that started in a file that has been removed is not accounted for.
        let Some((_, life)) = self.lives.get_mut(&function) else { return Ok(()) };
        let step = match event {
            FunctionEvent::Serving => &mut life.serving,
            FunctionEvent::Replaced => &mut life.replaced,
            FunctionEvent::Stopped | FunctionEvent::Started { .. } => &mut life.stopped,
        };
        step.get_or_insert(at);
        Ok(())
    }

    /// Adds the functions up that `are_over`; those without an end lived until `end`, and where they `ended` nobody saw
    /// when.
    fn settle(&mut self, end: u64, are_over: impl Fn(&Life) -> bool, ended: bool) {
        let (over, going): (BTreeMap<_, _>, _) =
            std::mem::take(&mut self.lives).into_iter().partition(|(_, (_, life))| are_over(life));
        self.lives = going;
        for (_, (tier, life)) in over {
            if life.stopped.is_none() {
                if ended {
                    self.estimated += SIGN_OF_LIFE.as_nanos() as u64;
                } else {
                    self.alive += 1;
                    self.per_hour += life.rate.0;
                }
            }
            let spent = life.spent(end);
            self.paid += spent.paid;
            self.failed += spent.failed;
            self.idle += spent.idle;
            self.cold_start += spent.cold_start;
            self.overlap += spent.overlap;
            self.residual += spent.residual;
            self.by_tier.entry(tier).or_default().idle += spent.idle;
        }
    }

    /// What the parts lack of what was paid, as a share of it.
    #[must_use]
    pub fn residual_share(&self) -> f64 {
        if self.paid == 0 { 0.0 } else { self.residual.unsigned_abs() as f64 / self.paid as f64 }
    }
}

fn entry<'a, T: Default>(
    map: &'a mut BTreeMap<String, T>,
    name: &str,
    of: &'static str,
) -> Result<&'a mut T, AccountError> {
    if !map.contains_key(name) && map.len() == NAMES {
        return Err(AccountError::TooMany { of });
    }
    Ok(map.entry(name.to_owned()).or_default())
}
