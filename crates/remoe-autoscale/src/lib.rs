//! Autoscaling: replica counts that follow load ([`replicas`]), and scale to zero ([`scale_to_zero`]).
//!
//! Pure: values in, values out, no clock. Gateway, `up` and operator take the same steps.

pub mod replicas;
pub mod scale_to_zero;
