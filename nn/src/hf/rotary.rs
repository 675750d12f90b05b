//! How a config says that positions turn: `rope_theta` and `rope_scaling`, or newer files' `rope_parameters`.

use super::fields::Faults;
use serde::Deserialize;
use serde_json::{Value, json};

/// The angles of rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    /// The pair i of c / 2 turns by theta^(-2 i / c) a position.
    pub theta: f64,
    /// How the frequencies are changed for texts longer than those of the first training.
    pub scaling: RotaryScaling,
}

/// How frequencies are changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// All are divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Those of waves longer than `original / low` positions are divided by the factor, those of waves shorter than
    /// `original / high` stay, between them the change is gradual. Llama 3.1.
    Llama3 {
        /// The factor.
        factor: f64,
        /// How often the slowest frequency that is changed in part turns in the original positions.
        low: f64,
        /// How often the fastest frequency that is changed turns in the original positions.
        high: f64,
        /// The positions of the first training.
        original: usize,
    },
}

impl Rotary {
    /// No scaling.
    #[must_use]
    pub fn new(theta: f64) -> Rotary {
        Rotary { theta, scaling: RotaryScaling::None }
    }

    /// The angles of one position for `channels / 2` pairs of channels.
    #[must_use]
    pub fn frequencies(&self, channels: usize) -> Vec<f64> {
        let plain = |i: usize| self.theta.powf(-2.0 * i as f64 / channels as f64);
        (0..channels / 2).map(|i| self.scaling.changed(plain(i))).collect()
    }

    pub(super) fn to_json(&self) -> Value {
        match self.scaling {
            RotaryScaling::None => Value::Null,
            RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RotaryScaling::Llama3 { factor, low, high, original } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }),
        }
    }
}

impl RotaryScaling {
    fn changed(self, f: f64) -> f64 {
        match self {
            RotaryScaling::None => f,
            RotaryScaling::Linear { factor } => f / factor,
            RotaryScaling::Llama3 { factor, low, high, original } => {
                let turns = original as f64 * f / (2.0 * std::f64::consts::PI);
                if turns < low {
                    f / factor
                } else if turns > high {
                    f
                } else {
                    let share = (turns - low) / (high - low);
                    (1.0 - share) * f / factor + share * f
                }
            }
        }
    }
}

/// `rope_scaling` or `rope_parameters` as it stands in a file.
#[derive(Deserialize)]
pub(super) struct Raw {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    // Its older name; some files have both.
    #[serde(rename = "type")]
    kind: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<u64>,
    partial_rotary_factor: Option<f64>,
}

impl Raw {
    /// What the file asks for by `[rope_parameters, rope_scaling]`; `theta` is what it says outside of these objects. Readers
    /// take one or the other where they differ, so such a file is refused.
    pub(super) fn check(objects: [Option<Raw>; 2], theta: Option<f64>, faults: &mut Faults) -> Rotary {
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
            faults.add(format!("`{first}` is {theta}, but `{name}` is {other}"));
        }
        if !(theta.is_finite() && theta >= 1.0) {
            faults.add(format!("`rope_theta` is {theta}, which is not a finite number of at least 1"));
        }
        let scalings: Vec<RotaryScaling> =
            objects.into_iter().flatten().map(|raw| raw.scaling(faults)).collect();
        if let [parameters, scaling] = scalings[..]
            && parameters != scaling
        {
            faults.add(format!(
                "`rope_parameters` asks for {parameters:?}, but `rope_scaling` for {scaling:?}"
            ));
        }
        Rotary { theta, scaling: scalings.first().copied().unwrap_or(RotaryScaling::None) }
    }

    fn scaling(self, faults: &mut Faults) -> RotaryScaling {
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            faults.add("`partial_rotary_factor` is not 1; all channels are turned".to_string());
        }
        if let (Some(one), Some(other)) = (&self.rope_type, &self.kind)
            && one != other
        {
            faults.add(format!("`rope_type` of `rope_scaling` is {one:?}, but its `type` is {other:?}"));
        }
        let mut factor = |name: &str, value: Option<f64>| match value {
            Some(x) if x.is_finite() && x > 0.0 => x,
            Some(x) => {
                faults.add(format!("`{name}` of `rope_scaling` is {x}, which is not above 0"));
                1.0
            }
            None => {
                faults.add(format!("`{name}` of `rope_scaling` is missing"));
                1.0
            }
        };
        match self.rope_type.or(self.kind).as_deref() {
            None | Some("default") => RotaryScaling::None,
            Some("linear") => RotaryScaling::Linear { factor: factor("factor", self.factor) },
            Some("llama3") => RotaryScaling::Llama3 {
                factor: factor("factor", self.factor),
                low: factor("low_freq_factor", self.low_freq_factor),
                high: factor("high_freq_factor", self.high_freq_factor),
                original: faults.extent(
                    "original_max_position_embeddings",
                    self.original_max_position_embeddings,
                    None,
                ),
            },
            Some(other) => {
                faults.add(format!("`rope_scaling` is of type {other:?}; run are default, linear, llama3"));
                RotaryScaling::None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_by_hand() {
        assert_eq!(Rotary::new(100.0).frequencies(4), [1.0, 0.1]);
        let linear = Rotary { scaling: RotaryScaling::Linear { factor: 4.0 }, ..Rotary::new(100.0) };
        assert_eq!(linear.frequencies(4), [0.25, 0.025]);
    }

    #[test]
    fn a_file_may_name_the_type_twice() {
        let told = |text: &str| {
            let mut faults = Faults(Vec::new());
            let raw: Raw = serde_json::from_str(text).unwrap();
            let rotary = Raw::check([Some(raw), None], None, &mut faults);
            (rotary.scaling, faults.0)
        };
        let (scaling, faults) = told(r#"{"type": "linear", "rope_type": "linear", "factor": 2.0}"#);
        assert!(scaling == RotaryScaling::Linear { factor: 2.0 } && faults.is_empty(), "{faults:?}");
        assert_eq!(told(r#"{"type": "linear", "factor": 2.0}"#).0, scaling);
        let (_, faults) = told(r#"{"type": "linear", "rope_type": "llama3", "factor": 2.0}"#);
        assert_eq!(faults[0], "`rope_type` of `rope_scaling` is \"llama3\", but its `type` is \"linear\"");
    }

    #[test]
    fn what_is_said_twice_must_be_said_alike() {
        let told = |[parameters, scaling]: [Option<&str>; 2], theta| {
            let mut faults = Faults(Vec::new());
            let objects = [parameters, scaling].map(|text| text.map(|t| serde_json::from_str(t).unwrap()));
            let rotary = Raw::check(objects, theta, &mut faults);
            (rotary, faults.0)
        };
        let (linear, plain) = (r#"{"rope_type": "linear", "factor": 2.0}"#, r#"{"rope_type": "default"}"#);
        let (rotary, faults) = told([Some(linear), Some(linear)], Some(50.0));
        assert_eq!((rotary.theta, faults), (50.0, Vec::new()));
        let (_, faults) = told([Some(plain), Some(linear)], None);
        let text = "`rope_parameters` asks for None, but `rope_scaling` for Linear { factor: 2.0 }";
        assert_eq!(faults, [text]);
        let (inner, other) = (r#"{"rope_theta": 50.0}"#, r#"{"rope_theta": 60.0}"#);
        assert_eq!(told([Some(inner), Some(inner)], Some(50.0)).1, Vec::<String>::new());
        assert_eq!(
            told([Some(inner), None], Some(70.0)).1,
            ["`rope_theta` is 70, but `rope_theta` of `rope_parameters` is 50"]
        );
        assert_eq!(
            told([Some(inner), Some(other)], None).1,
            ["`rope_theta` of `rope_parameters` is 50, but `rope_theta` of `rope_scaling` is 60"]
        );
    }

    #[test]
    fn long_waves_are_stretched_and_short_ones_stay() {
        // A frequency of 2 pi n turns n times in the one original position: above 50 it stays, below 10 it is divided by
        // 8, and 30 is half way.
        let original = 1;
        let turns = 2.0 * std::f64::consts::PI;
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 10.0, high: 50.0, original };
        let near =
            |f: f64, exact: f64| assert!((scaling.changed(f * turns) / turns - exact).abs() < 1e-12, "{f}");
        near(60.0, 60.0);
        near(8.0, 1.0);
        near(30.0, 0.5 * 30.0 + 0.5 * 30.0 / 8.0);
    }
}
