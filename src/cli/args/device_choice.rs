//! `--device`: the CPU, a GPU by its number, or the GPU of the process.

use super::values;
use shardgrad::Result;
use shardgrad::dist::Process;
use shardgrad::kernels::Device;
#[cfg(feature = "cuda")]
use shardgrad::kernels::cuda::{Driver, SearchPaths};
#[cfg(feature = "cuda")]
use shardgrad::{Error, Kind};
use std::fmt;

/// A device as the user names it. `cuda` without a number is the first GPU; among several processes of a machine, each takes its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceChoice {
    device: Device,
    is_numbered: bool,
}

impl DeviceChoice {
    /// Parses a device.
    pub(super) fn parse(text: &str) -> Result<DeviceChoice, String> {
        values::device(text).map(|device| DeviceChoice { device, is_numbered: text.contains(':') })
    }

    /// Returns whether the device is the CPU.
    pub(super) fn is_cpu(self) -> bool {
        self.device == Device::Cpu
    }

    /// Returns whether the user named a GPU by its number, which several processes may share.
    pub(super) fn is_numbered(self) -> bool {
        self.is_numbered
    }

    /// Returns the device of a process.
    ///
    /// # Errors
    /// `Kind::Config` if the machine has fewer GPUs than processes; an error of the driver.
    #[cfg(feature = "cuda")]
    pub(super) fn of_process(self, process: Option<&Process>) -> Result<Device> {
        let Some(process) = process.filter(|_| !self.is_numbered && !self.is_cpu()) else {
            return Ok(self.device);
        };
        let num_gpus = Driver::open(&SearchPaths::from_env())?.num_devices();
        let (local_rank, num_local_ranks) = (process.local_rank(), process.num_local_ranks());
        let is_restricted = std::env::var_os("CUDA_VISIBLE_DEVICES").is_some();
        gpu_of_local_rank(local_rank, num_local_ranks, num_gpus, is_restricted).map(Device::Cuda)
    }

    /// Returns the device of a process.
    ///
    /// # Errors
    /// None: a build without GPUs reports that when it opens one.
    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unnecessary_wraps, reason = "with the feature `cuda` it may fail")]
    pub(super) fn of_process(self, _: Option<&Process>) -> Result<Device> {
        Ok(self.device)
    }
}

/// Returns the number of the GPU of a local rank, among those that the driver shows to this process.
#[cfg(feature = "cuda")]
fn gpu_of_local_rank(
    local_rank: usize,
    num_local_ranks: usize,
    num_gpus: usize,
    is_restricted: bool,
) -> Result<usize> {
    if num_gpus >= num_local_ranks {
        return Ok(local_rank);
    }
    // The launcher shows each process its own GPU.
    if num_gpus == 1 && is_restricted {
        return Ok(0);
    }
    let why = format!(
        "{num_local_ranks} processes on this machine need a GPU each, and the driver reports {num_gpus}"
    );
    let help = "start one process per GPU, or name one that they share, as in --device cuda:0";
    Err(Error::new(Kind::Config, why).detail("help", help))
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device {
            Device::Cuda(_) if !self.is_numbered => f.write_str("cuda"),
            device => device.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choice_keeps_whether_a_number_was_given() {
        for text in ["cpu", "cuda", "cuda:0", "cuda:3"] {
            assert_eq!(DeviceChoice::parse(text).unwrap().to_string(), text);
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn local_ranks_take_the_visible_gpus_in_turn() {
        let all = |num_gpus: usize, is_restricted: bool| {
            (0..2).map(|rank| gpu_of_local_rank(rank, 2, num_gpus, is_restricted).ok()).collect::<Vec<_>>()
        };
        assert_eq!(all(2, false), [Some(0), Some(1)]);
        assert_eq!(all(8, true), [Some(0), Some(1)]);
        assert_eq!(all(1, true), [Some(0), Some(0)]);
        assert_eq!(all(1, false), [None, None]);
        let error = gpu_of_local_rank(1, 4, 2, true).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("4 processes on this machine need a GPU each, and the driver reports 2"),
            "{error}"
        );
        assert!(error.to_string().contains("--device cuda:0"), "{error}");
    }
}
