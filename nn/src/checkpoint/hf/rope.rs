//! Rotary position embeddings (RoPE) in configs: `rope_theta` and `rope_scaling`, or `rope_parameters` in newer files.

use super::config_fields::ConfigErrors;
use serde::Deserialize;
use serde_json::{Value, json};

/// Rotary position embedding (RoPE): base frequency and scaling.
#[doc(alias = "rotary")]
#[doc(alias = "rope_theta")]
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base: channel pair i of c / 2 rotates by theta^(-2 i / c) radians per position.
    pub theta: f64,
    /// The scaling of frequencies for contexts longer than those of pretraining.
    pub scaling: RopeScaling,
}

/// The scaling of rotary frequencies.
#[doc(alias = "rope_scaling")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Linear scaling: all frequencies are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1 scaling: frequencies with wavelengths above `original / low` positions are divided by the factor, those with
    /// wavelengths below `original / high` stay, and those between are interpolated.
    Llama3 {
        /// The factor.
        factor: f64,
        /// `low_freq_factor`: rotations within the original positions below which a frequency is fully scaled.
        low: f64,
        /// `high_freq_factor`: rotations within the original positions above which a frequency is not scaled.
        high: f64,
        /// `original_max_position_embeddings`: the positions of pretraining.
        original: usize,
    },
}

impl RopeConfig {
    /// A base without scaling.
    #[must_use]
    pub fn new(theta: f64) -> RopeConfig {
        RopeConfig { theta, scaling: RopeScaling::None }
    }

    /// Returns the rotation angles per position of the `channels / 2` channel pairs.
    #[must_use]
    pub fn frequencies(&self, channels: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / channels as f64);
        (0..channels / 2).map(|i| self.scaling.scale_frequency(plain(i))).collect()
    }

    /// The value of `rope_scaling` in a config file.
    pub(super) fn to_json(&self) -> Value {
        match self.scaling {
            RopeScaling::None => Value::Null,
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }),
        }
    }
}

impl RopeScaling {
    /// Applies the scaling to one frequency.
    fn scale_frequency(self, f: f64) -> f64 {
        match self {
            RopeScaling::None => f,
            RopeScaling::Linear { factor } => f / factor,
            RopeScaling::Llama3 { factor, low, high, original } => {
                let rotations = original as f64 * f / (2.0 * std::f64::consts::PI);
                if rotations < low {
                    f / factor
                } else if rotations > high {
                    f
                } else {
                    let share = (rotations - low) / (high - low);
                    (1.0 - share) * f / factor + share * f
                }
            }
        }
    }
}

/// The raw object `rope_scaling` or `rope_parameters` of a file.
#[derive(Deserialize)]
pub(super) struct Raw {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    // The older name of `rope_type`; some files have both.
    #[serde(rename = "type")]
    kind: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<u64>,
    partial_rotary_factor: Option<f64>,
}

impl Raw {
    /// Validates the objects `[rope_parameters, rope_scaling]` and the top-level `rope_theta`. Objects that contradict each other are
    /// an error, because programs differ in which of them they read.
    pub(super) fn check(
        objects: [Option<Raw>; 2],
        theta: Option<f64>,
        errors: &mut ConfigErrors,
    ) -> RopeConfig {
        let [parameters, scaling] = &objects;
        let inner = |raw: &Option<Raw>| raw.as_ref().and_then(|raw| raw.rope_theta);
        let mut thetas = [
            ("rope_theta", theta),
            ("rope_theta` of `rope_parameters", inner(parameters)),
            ("rope_theta` of `rope_scaling", inner(scaling)),
        ]
        .into_iter()
        .filter_map(|(name, theta)| Some((name, theta?)));
        let (first, theta) = thetas.next().unwrap_or(("rope_theta", 10_000.0));
        if let Some((name, other)) = thetas.find(|(_, other)| *other != theta) {
            errors.add(format!("`{first}` is {theta}, but `{name}` is {other}"));
        }
        if !(theta.is_finite() && theta >= 1.0) {
            errors.add(format!("`rope_theta` is {theta}, but must be a finite number of at least 1"));
        }
        let scalings: Vec<RopeScaling> =
            objects.into_iter().flatten().map(|raw| raw.scaling(errors)).collect();
        if let [parameters, scaling] = scalings[..]
            && parameters != scaling
        {
            errors.add(format!("`rope_parameters` is {parameters:?}, but `rope_scaling` is {scaling:?}"));
        }
        RopeConfig { theta, scaling: scalings.first().copied().unwrap_or(RopeScaling::None) }
    }

    fn scaling(self, errors: &mut ConfigErrors) -> RopeScaling {
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            errors.add("`partial_rotary_factor` is not 1; partial rotation is not supported, all channels are rotated".to_string());
        }
        if let (Some(one), Some(other)) = (&self.rope_type, &self.kind)
            && one != other
        {
            errors.add(format!("`rope_type` of `rope_scaling` is {one:?}, but its `type` is {other:?}"));
        }
        let mut factor = |name: &str, value: Option<f64>| match value {
            Some(x) if x.is_finite() && x > 0.0 => x,
            Some(x) => {
                errors.add(format!("`{name}` of `rope_scaling` is {x}, but must be above 0"));
                1.0
            }
            None => {
                errors.add(format!("`{name}` of `rope_scaling` is missing"));
                1.0
            }
        };
        match self.rope_type.or(self.kind).as_deref() {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: factor("factor", self.factor) },
            Some("llama3") => RopeScaling::Llama3 {
                factor: factor("factor", self.factor),
                low: factor("low_freq_factor", self.low_freq_factor),
                high: factor("high_freq_factor", self.high_freq_factor),
                original: errors.extent(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                    None,
                ),
            },
            Some(other) => {
                errors
                    .add(format!("`rope_scaling` is of type {other:?}; supported: default, linear, llama3"));
                RopeScaling::None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use approx::abs_diff_eq;

    #[test]
    fn frequencies_match_hand_computed_values() {
        assert_eq!(RopeConfig::new(100.0).frequencies(4), [1.0, 0.1]);
        let linear = RopeConfig { scaling: RopeScaling::Linear { factor: 4.0 }, ..RopeConfig::new(100.0) };
        assert_eq!(linear.frequencies(4), [0.25, 0.025]);
    }

    #[test]
    fn rope_type_and_type_must_agree() {
        let check = |text: &str| {
            let mut errors = ConfigErrors(Vec::new());
            let raw: Raw = serde_json::from_str(text).unwrap();
            let rotary = Raw::check([Some(raw), None], None, &mut errors);
            (rotary.scaling, errors.0)
        };
        let (scaling, errors) = check(r#"{"type": "linear", "rope_type": "linear", "factor": 2.0}"#);
        assert!(scaling == RopeScaling::Linear { factor: 2.0 } && errors.is_empty(), "{errors:?}");
        assert_eq!(check(r#"{"type": "linear", "factor": 2.0}"#).0, scaling);
        let (_, errors) = check(r#"{"type": "linear", "rope_type": "llama3", "factor": 2.0}"#);
        assert_eq!(errors[0], "`rope_type` of `rope_scaling` is \"llama3\", but its `type` is \"linear\"");
    }

    #[test]
    fn rope_parameters_and_rope_scaling_must_agree() {
        let check = |[parameters, scaling]: [Option<&str>; 2], theta| {
            let mut errors = ConfigErrors(Vec::new());
            let objects = [parameters, scaling].map(|text| text.map(|t| serde_json::from_str(t).unwrap()));
            let rotary = Raw::check(objects, theta, &mut errors);
            (rotary, errors.0)
        };
        let (linear, plain) = (r#"{"rope_type": "linear", "factor": 2.0}"#, r#"{"rope_type": "default"}"#);
        let (rotary, errors) = check([Some(linear), Some(linear)], Some(50.0));
        assert_eq!((rotary.theta, errors), (50.0, Vec::new()));
        let (_, errors) = check([Some(plain), Some(linear)], None);
        let text = "`rope_parameters` is None, but `rope_scaling` is Linear { factor: 2.0 }";
        assert_eq!(errors, [text]);
        let (inner, other) = (r#"{"rope_theta": 50.0}"#, r#"{"rope_theta": 60.0}"#);
        assert_eq!(check([Some(inner), Some(inner)], Some(50.0)).1, Vec::<String>::new());
        assert_eq!(
            check([Some(inner), None], Some(70.0)).1,
            ["`rope_theta` is 70, but `rope_theta` of `rope_parameters` is 50"]
        );
        assert_eq!(
            check([Some(inner), Some(other)], None).1,
            ["`rope_theta` of `rope_parameters` is 50, but `rope_theta` of `rope_scaling` is 60"]
        );
    }

    #[test]
    fn llama3_scaling_divides_low_frequencies_only() {
        // A frequency of 2 pi n makes n rotations in the one original position: above 50 it stays, below 10 it is divided by 8,
        // and 30 is half way.
        let original = 1;
        let turns = 2.0 * std::f64::consts::PI;
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 10.0, high: 50.0, original };
        let near = |f: f64, exact: f64| {
            let scaled = scaling.scale_frequency(f * turns) / turns;
            assert!(abs_diff_eq!(scaled, exact, epsilon = 1e-12), "{f}: {scaled}");
        };
        near(60.0, 60.0);
        near(8.0, 1.0);
        near(30.0, 0.5 * 30.0 + 0.5 * 30.0 / 8.0);
    }
}
