//! Possible sizes of functions, with the vCPUs and the price of each.

use crate::model::Model;
use crate::problem::VcpuRange;
use crate::problem::sizes::first_at_least;

/// A size that a function can have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizing {
    /// Memory in bytes.
    pub bytes: f64,
    /// vCPUs, if they are a decision variable.
    pub stated: Option<f64>,
    /// vCPUs: stated, or those that come with the memory.
    pub vcpus: f64,
    /// Dollars per second.
    pub rate: f64,
}

impl Model<'_> {
    /// Returns the vCPUs that come with a main function of `bytes`, or the most allowed if vCPUs are a decision variable.
    pub fn main_vcpus(&self, bytes: f64) -> f64 {
        self.problem.specs.main_vcpus.map_or(bytes / self.vcpu_bytes, VcpuRange::largest)
    }

    /// Returns the vCPUs that come with a remote function of `bytes`, or the most allowed if vCPUs are a decision variable.
    pub fn remote_vcpus(&self, bytes: f64) -> f64 {
        self.problem.specs.remote_vcpus.map_or(bytes / self.vcpu_bytes, VcpuRange::largest)
    }

    /// Returns the sizes of a main function that hold `bytes`, the cheapest first.
    pub fn main_sizings(&self, bytes: f64) -> impl Iterator<Item = Sizing> {
        self.sizings(&self.main_sizes, self.problem.specs.main_vcpus, bytes, 1.0)
    }

    /// Returns the sizes of a remote function that hold `bytes`, the cheapest first.
    pub fn remote_sizings(&self, bytes: f64) -> impl Iterator<Item = Sizing> {
        self.sizings(&self.remote_sizes, self.problem.specs.remote_vcpus, bytes, self.remote_share)
    }

    /// Collects [`Self::main_sizings`].
    pub fn main_options(&self, bytes: f64) -> Vec<Sizing> {
        self.main_sizings(bytes).collect()
    }

    /// Collects [`Self::remote_sizings`].
    pub fn remote_options(&self, bytes: f64) -> Vec<Sizing> {
        self.remote_sizings(bytes).collect()
    }

    /// Returns [`Self::main_options`] without those that cost more but are not faster: beyond the measured vCPUs.
    pub fn useful_main_options(&self, bytes: f64) -> Vec<Sizing> {
        let points = self
            .layers
            .iter()
            .flat_map(|layer| layer.curve.vcpus().last().copied().into_iter().chain(layer.nonexpert_vcpus()));
        self.up_to_measured(self.main_options(bytes), points.fold(0.0, f64::max))
    }

    /// Returns [`Self::remote_options`] without those that cost more but are not faster.
    pub fn useful_remote_options(&self, bytes: f64) -> Vec<Sizing> {
        let points = self.layers.iter().flat_map(|layer| layer.remote_curve().vcpus().last().copied());
        self.up_to_measured(self.remote_options(bytes), points.fold(0.0, f64::max))
    }

    /// Returns `options` up to the first with `vcpus`, the most that were measured.
    fn up_to_measured(&self, mut options: Vec<Sizing>, vcpus: f64) -> Vec<Sizing> {
        // Below one vCPU a CPU quota throttles functions, whatever was measured.
        let most = if self.problem.cpu_quotas { vcpus.max(1.0) } else { vcpus };
        if let Some(last) = options.iter().position(|sizing| sizing.vcpus >= most) {
            options.truncate(last + 1);
        }
        options
    }

    /// Returns the sizes that hold `bytes`. Rates are multiplied by `paid_share`.
    fn sizings<'s>(
        &'s self,
        sizes: &'s [f64],
        vcpus: Option<VcpuRange>,
        bytes: f64,
        paid_share: f64,
    ) -> impl Iterator<Item = Sizing> + 's {
        let sizes = &sizes[first_at_least(sizes, bytes)..];
        let least = sizes.first().copied();
        let of_range = vcpus.into_iter().flat_map(VcpuRange::all);
        let stated = of_range.filter_map(move |vcpus| Some((least?, Some(vcpus))));
        let coupled = sizes.iter().filter(move |_| vcpus.is_none()).map(|bytes| (*bytes, None));
        stated.chain(coupled).map(move |(bytes, stated)| Sizing {
            bytes,
            stated,
            vcpus: stated.unwrap_or(bytes / self.vcpu_bytes),
            rate: paid_share * self.function_rate(bytes, stated),
        })
    }

    /// Returns the dollars per second of a function with `bytes`, and with `vcpus` if they are a decision variable.
    pub fn function_rate(&self, bytes: f64, vcpus: Option<f64>) -> f64 {
        self.problem.pricing.function_rate(bytes, vcpus)
    }

    /// Returns the dollars per second of a remote function, in the mean over all time; see [`Model::remote_share`].
    pub fn remote_rate(&self, bytes: f64, vcpus: Option<f64>) -> f64 {
        self.remote_share * self.function_rate(bytes, vcpus)
    }
}
