//! Costs of requests that are planned from a forecast and billed with their true routing. What a prediction is worth is
//! the difference to the cost with another forecast.

use crate::error::ExperimentError;
use crate::scenario::{ExpertShares, Scenario};
use remoe_planner::{PlanError, Remote};
use serde::Serialize;

/// Forecast of the experts that requests use.
#[derive(Debug, Clone, PartialEq)]
pub struct UsageForecast {
    /// Name in tables.
    pub name: &'static str,
    /// Predicted share of each expert in the assignments of its layer, prefill and decode together, for each request of the
    /// scenario.
    pub predicted: Vec<ExpertShares>,
}

/// Cost of requests with plans from one forecast.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ForecastCost {
    /// Name of the forecast.
    pub name: &'static str,
    /// Dollars of 1,000 requests with [`Remote::Auto`].
    #[serde(rename = "free")]
    pub auto_dollars: f64,
    /// Dollars of 1,000 requests with [`Remote::Always`]; absent if at least one request has no
    /// such plan within the limits.
    #[serde(rename = "remote")]
    pub always_remote_dollars: Option<f64>,
    /// Mean over the requests of [`RequestPrice::remote_share`], with [`Remote::Always`].
    #[serde(rename = "remote_pairs")]
    pub remote_share: Option<f64>,
    /// Each request under its plan with remote experts; empty without such plans.
    #[serde(skip)]
    pub each: Vec<RequestPrice>,
}

/// Cost of one request under its plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestPrice {
    /// Dollars of the request.
    pub dollars: f64,
    /// Share of the request's (token, expert) pairs that were remote.
    pub remote_share: f64,
}

impl Scenario {
    /// Plans every request from each of `forecasts`, and bills it with its true routing.
    ///
    /// # Errors
    /// The scenario is invalid, or no plan keeps its limits.
    pub fn forecast_costs(&self, forecasts: &[UsageForecast]) -> Result<Vec<ForecastCost>, ExperimentError> {
        self.check()?;
        forecasts.iter().map(|forecast| self.forecast_cost(forecast)).collect()
    }

    fn forecast_cost(&self, forecast: &UsageForecast) -> Result<ForecastCost, ExperimentError> {
        let count = self.requests.len().max(1) as f64;
        let auto_prices = self.request_prices(forecast, Remote::Auto)?;
        let mut costs = ForecastCost {
            name: forecast.name,
            auto_dollars: auto_prices.iter().map(|price| price.dollars).sum::<f64>() * 1000.0 / count,
            always_remote_dollars: None,
            remote_share: None,
            each: Vec::new(),
        };
        let always_prices = match self.request_prices(forecast, Remote::Always) {
            Ok(prices) => prices,
            Err(ExperimentError::Plan { error: PlanError::Infeasible(_), .. }) => return Ok(costs),
            Err(error) => return Err(error),
        };
        costs.always_remote_dollars =
            Some(always_prices.iter().map(|price| price.dollars).sum::<f64>() * 1000.0 / count);
        costs.remote_share = Some(always_prices.iter().map(|price| price.remote_share).sum::<f64>() / count);
        costs.each = always_prices;
        Ok(costs)
    }

    /// Returns the cost of each request under its plan.
    fn request_prices(
        &self,
        forecast: &UsageForecast,
        policy: Remote,
    ) -> Result<Vec<RequestPrice>, ExperimentError> {
        let steps = self.setting.decode_steps;
        let each = self.requests.iter().zip(&forecast.predicted).map(|(request, predicted)| {
            let problem = self.problem(request.input_tokens, steps, predicted.clone())?;
            let plan = self.solve(&problem, policy)?.plan;
            let dollars = self.outcome(&plan, request)?.cost;
            let share_of = |shares: &ExpertShares| -> f64 {
                let layers = plan.layers.iter().zip(shares);
                let of_layer =
                    layers.map(|(layer, row)| layer.remote.iter().map(|id| row[*id as usize]).sum::<f64>());
                of_layer.sum::<f64>() / shares.len().max(1) as f64
            };
            let (prefill, decode) = (share_of(&request.prefill), share_of(&request.decode));
            let remote_share =
                (prefill * request.input_tokens + decode * steps) / (request.input_tokens + steps);
            Ok(RequestPrice { dollars, remote_share })
        });
        each.collect()
    }
}
