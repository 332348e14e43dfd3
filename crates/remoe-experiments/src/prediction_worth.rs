//! Worth of a prediction: each request is planned from a forecast, and billed with its true routing.

use crate::error::ExperimentError;
use crate::scenario::{ExpertShares, Scenario};
use remoe_planner::{PlanError, Remote};
use serde::Serialize;

/// Forecast of the experts that requests use.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageForecast {
    /// Name in tables.
    pub name: &'static str,
    /// Predicted shares of both phases together, for each request of the scenario.
    pub predicted: Vec<ExpertShares>,
}

/// Cost of requests with plans from one forecast.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PredictionWorth {
    /// Name of the forecast.
    pub name: &'static str,
    /// Dollars of 1,000 requests with [`Remote::Auto`].
    pub free: f64,
    /// Dollars of 1,000 requests with [`Remote::Always`]; absent if no such plan keeps the limits of some request.
    pub remote: Option<f64>,
    /// Share of the (token, expert) pairs that were remote under these plans.
    pub remote_pairs: Option<f64>,
    /// Each request under its plan with remote experts; empty without such plans.
    #[serde(skip)]
    pub each: Vec<RequestPrice>,
}

/// Cost of one request under its plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestPrice {
    /// Dollars of the request.
    pub dollars: f64,
    /// Share of its (token, expert) pairs that were remote.
    pub remote_pairs: f64,
}

impl Scenario {
    /// Plans every request from each of `forecasts`, and bills it with its true routing.
    ///
    /// # Errors
    /// The scenario is invalid, or no plan keeps its limits.
    pub fn worth(&self, forecasts: &[UsageForecast]) -> Result<Vec<PredictionWorth>, ExperimentError> {
        self.check()?;
        forecasts.iter().map(|forecast| self.worth_of(forecast)).collect()
    }

    fn worth_of(&self, forecast: &UsageForecast) -> Result<PredictionWorth, ExperimentError> {
        let count = self.requests.len().max(1) as f64;
        let free = self.request_prices(forecast, Remote::Auto)?;
        let mut worth = PredictionWorth {
            name: forecast.name,
            free: free.iter().map(|price| price.dollars).sum::<f64>() * 1000.0 / count,
            remote: None,
            remote_pairs: None,
            each: Vec::new(),
        };
        let remote = match self.request_prices(forecast, Remote::Always) {
            Ok(remote) => remote,
            Err(ExperimentError::Plan { error: PlanError::Infeasible(_), .. }) => return Ok(worth),
            Err(error) => return Err(error),
        };
        worth.remote = Some(remote.iter().map(|price| price.dollars).sum::<f64>() * 1000.0 / count);
        worth.remote_pairs = Some(remote.iter().map(|price| price.remote_pairs).sum::<f64>() / count);
        worth.each = remote;
        Ok(worth)
    }

    /// Returns the cost of each request under its plan.
    fn request_prices(
        &self,
        forecast: &UsageForecast,
        remote: Remote,
    ) -> Result<Vec<RequestPrice>, ExperimentError> {
        let steps = self.setting.decode_steps;
        let each = self.requests.iter().zip(&forecast.predicted).map(|(request, predicted)| {
            let problem = self.problem(request.input_tokens, steps, predicted.clone())?;
            let plan = self.solve(&problem, remote)?.plan;
            let dollars = self.outcome(&plan, request)?.cost;
            let remote_share = |shares: &ExpertShares| -> f64 {
                let layers = plan.layers.iter().zip(shares);
                let of_layer =
                    layers.map(|(layer, row)| layer.remote.iter().map(|id| row[*id as usize]).sum::<f64>());
                of_layer.sum::<f64>() / shares.len().max(1) as f64
            };
            let (prefill, decode) = (remote_share(&request.prefill), remote_share(&request.decode));
            let pairs = (prefill * request.input_tokens + decode * steps) / (request.input_tokens + steps);
            Ok(RequestPrice { dollars, remote_pairs: pairs })
        });
        each.collect()
    }
}
