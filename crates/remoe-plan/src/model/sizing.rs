//! Sizes of functions that hold what they need, with the vCPUs and the price of each.

use crate::model::Model;
use crate::problem::VcpuRange;
use crate::problem::sizes::first_at_least;

/// A size that a function can have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sizing {
    /// Memory in bytes.
    pub bytes: f64,
    /// vCPUs where they are a decision of their own.
    pub stated: Option<f64>,
    /// vCPUs in any case.
    pub vcpus: f64,
    /// Dollars per second.
    pub rate: f64,
}

impl Model<'_> {
    /// vCPUs that a main function of `bytes` has: those that its memory brings, or as many as it may have
    /// where they are a decision of their own.
    pub fn main_vcpus(&self, bytes: f64) -> f64 {
        self.problem.specs.main_vcpus.map_or(bytes / self.vcpu_bytes, VcpuRange::largest)
    }

    /// vCPUs of a remote function of `bytes`.
    pub fn remote_vcpus(&self, bytes: f64) -> f64 {
        self.problem.specs.remote_vcpus.map_or(bytes / self.vcpu_bytes, VcpuRange::largest)
    }

    /// Sizes of a main function that needs `bytes`, the cheaper first; empty where no size holds them.
    pub fn main_sizings(&self, bytes: f64) -> impl Iterator<Item = Sizing> {
        self.sizings(&self.main_sizes, self.problem.specs.main_vcpus, bytes, 1.0)
    }

    /// As above for a remote function.
    pub fn remote_sizings(&self, bytes: f64) -> impl Iterator<Item = Sizing> {
        self.sizings(&self.remote_sizes, self.problem.specs.remote_vcpus, bytes, self.remote_share)
    }

    /// All [`Self::main_sizings`].
    pub fn main_options(&self, bytes: f64) -> Vec<Sizing> {
        self.main_sizings(bytes).collect()
    }

    /// All [`Self::remote_sizings`].
    pub fn remote_options(&self, bytes: f64) -> Vec<Sizing> {
        self.remote_sizings(bytes).collect()
    }

    /// [`Self::main_options`] up to the first on which nothing is slower than on any larger one: those cost more.
    pub fn useful_main_options(&self, bytes: f64) -> Vec<Sizing> {
        let points = self
            .layers
            .iter()
            .flat_map(|layer| layer.curve.vcpus().last().copied().into_iter().chain(layer.rest_vcpus()));
        self.useful(self.main_options(bytes), points.fold(0.0, f64::max))
    }

    /// [`Self::remote_options`] up to the first on which nothing is slower than on any larger one.
    pub fn useful_remote_options(&self, bytes: f64) -> Vec<Sizing> {
        let points = self.layers.iter().flat_map(|layer| layer.remote_curve().vcpus().last().copied());
        self.useful(self.remote_options(bytes), points.fold(0.0, f64::max))
    }

    /// `options` up to the first with `vcpus`, the most that were measured.
    fn useful(&self, mut options: Vec<Sizing>, vcpus: f64) -> Vec<Sizing> {
        // Quotas hold functions of less than one vCPU back, whatever was measured.
        let most = if self.problem.cpu_quotas { vcpus.max(1.0) } else { vcpus };
        if let Some(last) = options.iter().position(|sizing| sizing.vcpus >= most) {
            options.truncate(last + 1);
        }
        options
    }

    /// Sizes of functions that need `bytes`, with their cost where they are paid for `paid` of the time.
    fn sizings<'s>(
        &'s self,
        sizes: &'s [f64],
        vcpus: Option<VcpuRange>,
        bytes: f64,
        paid: f64,
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
            rate: paid * self.function_rate(bytes, stated),
        })
    }

    /// Dollars per second of a function with `bytes`, and with `vcpus` where they are a decision of their own.
    pub fn function_rate(&self, bytes: f64, vcpus: Option<f64>) -> f64 {
        self.problem.pricing.function_rate(bytes, vcpus)
    }

    /// Sizes of a remote function, with their cost over all time.
    pub fn remote_rate(&self, bytes: f64, vcpus: Option<f64>) -> f64 {
        self.remote_share * self.function_rate(bytes, vcpus)
    }
}
