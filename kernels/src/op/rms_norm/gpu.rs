//! Root-mean-square normalisation on GPUs: the code of layer normalisation without a centre.

use super::{BACKWARD, FORWARD};
use crate::error::KernelError;
use crate::gpu::LaunchPlan;
use crate::kernel::Launch;
use crate::op::layer_norm::gpu::{backward_of, forward_of};

pub(super) use crate::op::layer_norm::gpu::SOURCE;

pub(super) fn forward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    forward_of(FORWARD.name, launch, plan)
}

pub(super) fn backward(launch: &Launch<'_>, plan: &mut LaunchPlan) -> Result<(), KernelError> {
    backward_of(BACKWARD.name, launch, plan)
}
