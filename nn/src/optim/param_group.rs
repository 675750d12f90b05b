//! Parameter groups: settings for parameters whose names match a pattern.

use super::hyperparameter::{NOT_NEGATIVE, check_setting};
use crate::module::name::{matches, nearest};
use crate::module::param::Param;
use shardgrad_tensor::{Error, Kind, Result};
use std::fmt;

/// Settings of a parameter group that override the settings of the optimizer.
#[doc(alias = "add_param_group")]
#[doc(alias = "param_groups")]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ParamGroup {
    /// Factor on the common learning rate.
    pub lr_scale: Option<f64>,
    /// Weight decay, for parameters of any number of dims.
    pub weight_decay: Option<f64>,
}

/// Parameter groups by a pattern on parameter names. Later groups take precedence, setting by setting.
#[derive(Clone, Debug, Default)]
pub(super) struct ParamGroups(pub(super) Vec<(String, ParamGroup)>);

/// Writes `[PATTERN: SETTING VALUE, ...; ...]`.
impl fmt::Display for ParamGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let setting = |(name, value): (&str, Option<f64>)| value.map(|value| format!("{name} {value}"));
        let group = |(pattern, group): &(String, ParamGroup)| {
            let settings = [("lr_scale", group.lr_scale), ("weight_decay", group.weight_decay)];
            format!("{pattern}: {}", settings.into_iter().filter_map(setting).collect::<Vec<_>>().join(", "))
        };
        write!(f, "[{}]", self.0.iter().map(group).collect::<Vec<_>>().join("; "))
    }
}

impl ParamGroups {
    #[track_caller]
    pub(super) fn push(&mut self, pattern: &str, group: ParamGroup) {
        check_setting("the lr_scale of a group", group.lr_scale.unwrap_or(0.0), NOT_NEGATIVE);
        check_setting("the weight_decay of a group", group.weight_decay.unwrap_or(0.0), NOT_NEGATIVE);
        self.0.push((pattern.to_string(), group));
    }

    /// Refuses patterns that match no parameter.
    pub(super) fn check(&self, params: &[Param]) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = params.iter().map(Param::name).collect();
        let is_unmatched = |pattern: &&str| !names.iter().any(|name| matches(pattern, name));
        let unmatched: Vec<&str> =
            self.0.iter().map(|(pattern, _)| pattern.as_str()).filter(is_unmatched).collect();
        if unmatched.is_empty() {
            return Ok(());
        }
        let text = format!("{} parameter group(s) of the optimizer match no parameter", unmatched.len());
        Err(unmatched.into_iter().fold(Error::new(Kind::Config, text), |error, pattern| {
            let near = nearest(pattern, names.iter().map(String::as_str)).join(", ");
            error.detail("group", format!("{pattern}; nearest: {near}"))
        }))
    }

    /// Returns learning rate and weight decay of a parameter, given the common ones. The common decay applies to
    /// parameters of two or more dims (in files).
    pub(super) fn of(&self, param: &Param, lr: f64, weight_decay: f64) -> [f64; 2] {
        let name = param.name();
        let (mut lr_scale, mut weight_decay) =
            (1.0, if param.has_weight_decay() { weight_decay } else { 0.0 });
        for (_, group) in self.0.iter().filter(|(pattern, _)| matches(pattern, &name)) {
            lr_scale = group.lr_scale.unwrap_or(lr_scale);
            weight_decay = group.weight_decay.unwrap_or(weight_decay);
        }
        [lr * lr_scale, weight_decay]
    }
}

#[cfg(test)]
mod tests {
    use super::ParamGroup;
    use crate::optim::{AdamW, Optimizer, Sgd};

    #[test]
    fn description_lists_the_settings_of_groups() {
        let frozen = ParamGroup { lr_scale: Some(0.0), weight_decay: None };
        let both = ParamGroup { lr_scale: Some(0.5), weight_decay: Some(1e-3) };
        assert_eq!(
            AdamW::new(0.25).group("*.bias", frozen).group("wte.*", both).describe(),
            "AdamW lr 0.25, betas [0.9, 0.999], eps 0.00000001, weight decay 0, \
             groups [*.bias: lr_scale 0; wte.*: lr_scale 0.5, weight_decay 0.001], after 0 steps"
        );
        assert!(Sgd::new(0.5).describe().ends_with("weight decay 0, groups [], after 0 steps"));
    }
}
