//! The name of a device: `cpu`, `cuda:1` or `null`.

use std::fmt;

/// The device that a tensor is stored on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory and host threads.
    Cpu,
    /// An NVIDIA GPU, by the ordinal that the CUDA driver gives it.
    Cuda(usize),
    /// No memory and no arithmetic: shapes, bytes and costs only.
    Null,
}

impl Device {
    /// Parses `cpu`, `null`, `cuda:1`, and `cuda` for the first GPU.
    #[must_use]
    pub fn parse(text: &str) -> Option<Device> {
        match text {
            "cpu" => Some(Device::Cpu),
            "null" => Some(Device::Null),
            "cuda" => Some(Device::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:")?;
                let is_number = ordinal.bytes().all(|b| b.is_ascii_digit());
                ordinal.parse().ok().filter(|_| is_number).map(Device::Cuda)
            }
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Device::Null => f.write_str("null"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_and_parse_round_trip() {
        for (text, device) in [("cpu", Device::Cpu), ("null", Device::Null), ("cuda:3", Device::Cuda(3))] {
            assert_eq!((Device::parse(text), &*device.to_string()), (Some(device), text));
        }
        assert_eq!(Device::parse("cuda"), Some(Device::Cuda(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda1", "CPU"] {
            assert_eq!(Device::parse(text), None, "{text}");
        }
    }
}
