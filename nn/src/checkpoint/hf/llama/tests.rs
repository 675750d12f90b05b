//! Configs of the Llama family: reading, writing and rejecting.

use super::sliding_window::{FULL, WINDOWED};
use super::*;
use shardgrad_tensor::{Error, Kind};

/// The published 8B model of Llama 3.1.
const PUBLISHED: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
    "vocab_size": 128256
}"#;

fn parse(kind: LlamaKind, text: &str) -> Result<LlamaConfig> {
    LlamaConfig::parse(kind, Path::new("config.json"), text)
}

fn changed(kind: LlamaKind, from: &str, to: &str) -> Result<LlamaConfig> {
    assert!(PUBLISHED.contains(from), "{from}");
    parse(kind, &PUBLISHED.replacen(from, to, 1))
}

fn error_text(from: &str, to: &str) -> String {
    let error: Error = changed(LlamaKind::Llama, from, to).unwrap_err();
    assert_eq!(error.kind(), Kind::Checkpoint);
    assert_eq!(error.message(), "config.json: describes a model that this version does not support");
    error.details()[0].1.clone()
}

#[test]
fn the_published_config_equals_the_preset_and_is_written_back() {
    let read = parse(LlamaKind::Llama, PUBLISHED).unwrap();
    let preset = LlamaConfig::preset("llama-8b").unwrap();
    assert_eq!(LlamaConfig { extra_fields: Map::new(), dtype: DType::F32, ..read.clone() }, preset);
    assert_eq!(read.extra_fields["eos_token_id"], json!([128001, 128008, 128009]));
    assert_eq!(parse(LlamaKind::Llama, &read.to_json()).unwrap(), read);
    let (before, after): (Map<String, Value>, Map<String, Value>) =
        (serde_json::from_str(PUBLISHED).unwrap(), serde_json::from_str(&read.to_json()).unwrap());
    for (name, value) in before {
        assert_eq!(after[&name], value, "{name}");
    }
    assert_eq!(after.len(), 25, "the same fields and head_dim");
}

#[test]
fn written_configs_of_every_member_are_read_back() {
    for kind in LlamaKind::ALL {
        let mut config = LlamaConfig::new(kind, 100, 50, [24, 36], 2, [6, 3]);
        config.head_dim = 8;
        config.tie_word_embeddings = true;
        config.rope.scaling = RopeScaling::Linear { factor: 2.0 };
        if kind != LlamaKind::Llama {
            let some = matches!(kind, LlamaKind::Qwen2 | LlamaKind::Qwen3);
            config.windows = vec![Some(10), (!some).then_some(10)];
        }
        let text = config.to_json();
        let mut read = parse(kind, &text).unwrap();
        read.extra_fields.clear();
        assert_eq!(read, config, "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["model_type"], kind.name());
        assert_eq!(config.attention_bias, kind == LlamaKind::Qwen2);
        assert!(!config.output_bias());
    }
}

#[test]
fn rope_theta_may_be_in_rope_parameters() {
    let text = r#"{"vocab_size": 9, "max_position_embeddings": 8, "hidden_size": 8, "intermediate_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "dtype": "float16",
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}}"#;
    let config = parse(LlamaKind::Llama, text).unwrap();
    assert_eq!(config.rope.theta, 500.0);
    assert_eq!(config.rope.scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!((config.dtype, config.num_key_value_heads, config.head_dim), (DType::F16, 2, 4));
    let value: Value = serde_json::from_str(&config.to_json()).unwrap();
    assert_eq!((&value["rope_theta"], &value["rope_parameters"]), (&json!(500.0), &Value::Null));
    // Two different values are an error, because programs differ in which of them they read.
    let both = text.replacen("\"dtype\"", "\"rope_theta\": 100.0, \"dtype\"", 1);
    let error = parse(LlamaKind::Llama, &both).unwrap_err();
    let expected = "`rope_theta` is 100, but `rope_theta` of `rope_parameters` is 500";
    assert_eq!(error.details()[0].1, expected);
}

#[test]
fn sliding_windows_are_read_by_the_rules_of_each_member() {
    let with = |kind, field: &str| changed(kind, "\"use_cache\": true", field);
    let windows = |kind, field: &str| with(kind, field).unwrap().windows;
    let (all, none) = (vec![Some(4096); 32], Vec::new());
    assert_eq!(windows(LlamaKind::Mistral, "\"sliding_window\": 4096"), all);
    assert_eq!(windows(LlamaKind::Mistral, "\"x\": 1"), all, "the default is a window");
    assert_eq!(windows(LlamaKind::Mistral, "\"sliding_window\": null"), none);
    assert_eq!(
        windows(LlamaKind::Mistral, "\"sliding_window\": 131072"),
        none,
        "the window covers all positions"
    );
    assert_eq!(windows(LlamaKind::Llama, "\"sliding_window\": 4096"), none, "llama has no windows");
    let off = "\"sliding_window\": 4096, \"use_sliding_window\": false";
    assert_eq!(windows(LlamaKind::Qwen2, off), none);
    let on = "\"sliding_window\": 4096, \"use_sliding_window\": true";
    let last: Vec<_> = (0..32).map(|layer| (layer >= 28).then_some(4096)).collect();
    assert_eq!(windows(LlamaKind::Qwen3, on), last, "the first 28 blocks have no window");
    assert_eq!(windows(LlamaKind::Qwen2, &format!("{on}, \"max_window_layers\": 0")), all);
    assert_eq!(windows(LlamaKind::Qwen2, &format!("{on}, \"max_window_layers\": 32")), none);
    let types: Vec<&str> = (0..32).map(|i| if i % 2 == 0 { WINDOWED } else { FULL }).collect();
    let found = windows(LlamaKind::Qwen2, &format!("{on}, \"layer_types\": {types:?}"));
    assert!((0..32).all(|i| found[i].is_some() == (i % 2 == 0)), "{found:?}");
    let window_error = |kind, field: &str| with(kind, field).unwrap_err().details()[0].1.clone();
    assert_eq!(
        window_error(LlamaKind::Mistral, "\"sliding_window\": 0"),
        "`sliding_window` is 0, but must be in 1..=16777216"
    );
    assert_eq!(
        window_error(LlamaKind::Mistral, "\"sliding_window\": \"x\""),
        "`sliding_window` is \"x\", but must be a number of keys"
    );
    let text = "`layer_types` must be a list of 32 entries, each sliding_attention or full_attention";
    assert_eq!(window_error(LlamaKind::Qwen3, &format!("{on}, \"layer_types\": [\"full_attention\"]")), text);
    let odd = format!("{on}, \"layer_types\": {:?}", ["chunked_attention"; 32]);
    assert_eq!(window_error(LlamaKind::Qwen3, &odd), text);
}

/// The windows after changing, writing and reading back a config, or why the file cannot represent them.
fn windows_read_back(
    kind: LlamaKind,
    field: &str,
    windows: &[Option<usize>],
) -> Result<Vec<Option<usize>>, String> {
    let mut config = changed(kind, "\"use_cache\": true", field).unwrap();
    config.num_hidden_layers = windows.len();
    config.windows = windows.to_vec();
    let read = parse(kind, &config.to_json()).unwrap();
    match config.unrepresentable(&read)[..] {
        [] => Ok((0..windows.len()).map(|layer| read.window(layer)).collect()),
        [ref error_text, ..] => Err(error_text.clone()),
    }
}

#[test]
fn changed_windows_are_written() {
    let all = "\"sliding_window\": 4096";
    let some = "\"sliding_window\": 4096, \"use_sliding_window\": true, \"max_window_layers\": 1";
    for windows in [[None, None], [Some(9), Some(9)], [Some(4096), Some(4096)]] {
        for field in ["\"x\": 1", all, "\"sliding_window\": null"] {
            assert_eq!(windows_read_back(LlamaKind::Mistral, field, &windows).unwrap(), windows, "{field}");
        }
    }
    for windows in [[None, None], [Some(9), Some(9)], [None, Some(4096)], [Some(4096), None]] {
        for field in ["\"x\": 1", all, some] {
            assert_eq!(windows_read_back(LlamaKind::Qwen3, field, &windows).unwrap(), windows, "{field}");
        }
    }
    // Fields that mean the same windows stay as they were read.
    let mut read = changed(LlamaKind::Qwen2, "\"use_cache\": true", some).unwrap();
    let field = |config: &LlamaConfig, name: &str| {
        serde_json::from_str::<Map<String, Value>>(&config.to_json()).unwrap().get(name).cloned()
    };
    assert_eq!(field(&read, "max_window_layers"), Some(json!(1)));
    assert_eq!(field(&read, "layer_types"), None);
    read.windows.clear();
    assert_eq!(field(&read, "use_sliding_window"), None);
    // An extra field never overrides a field of the config.
    read.extra_fields.insert("hidden_size".to_string(), json!(1));
    assert_eq!(field(&read, "hidden_size"), Some(json!(4096)));
}

#[test]
fn windows_and_biases_that_a_member_cannot_represent_are_reported() {
    let plain = "\"x\": 1";
    assert_eq!(
        windows_read_back(LlamaKind::Llama, plain, &[Some(9), None]).unwrap_err(),
        "`windows` is [Some(9), None]; a llama config can hold no window"
    );
    assert_eq!(
        windows_read_back(LlamaKind::Mistral, plain, &[Some(9), None]).unwrap_err(),
        "`windows` is [Some(9), None]; a mistral config can hold one window, of all blocks"
    );
    assert_eq!(
        windows_read_back(LlamaKind::Qwen2, plain, &[Some(4), Some(8)]).unwrap_err(),
        "`windows` is [Some(4), Some(8)]; a qwen2 config can hold one window, of some blocks"
    );
    let mut config = LlamaConfig::new(LlamaKind::Qwen2, 9, 8, [8, 4], 1, [2, 1]);
    config.attention_bias = false;
    let read = parse(config.kind, &config.to_json()).unwrap();
    assert_eq!(
        config.unrepresentable(&read),
        ["`attention_bias` is false, but a qwen2 config is read as true"]
    );
}

#[test]
fn spellings_that_transformers_accepts_are_read() {
    assert!(changed(LlamaKind::Llama, "\"silu\"", "\"swish\"").is_ok(), "another name of SiLU");
    let (from, null) = ("\"num_key_value_heads\": 8", "\"num_key_value_heads\": null");
    for kind in LlamaKind::ALL.into_iter().filter(|kind| !kind.has_experts()) {
        assert_eq!(changed(kind, from, null).unwrap().num_key_value_heads, 32);
        let missing = changed(kind, from, "\"x\": 1");
        match kind {
            LlamaKind::Llama => assert_eq!(missing.unwrap().num_key_value_heads, 32),
            _ => assert!(missing.unwrap_err().to_string().contains("`num_key_value_heads` is missing")),
        }
    }
}

/// The experts of a config with additional fields, or the first error.
fn experts(kind: LlamaKind, fields: &str) -> Result<ExpertsConfig, String> {
    let read = changed(kind, "\"use_cache\": true", fields);
    read.map(|config| config.experts.unwrap()).map_err(|e| e.details()[0].1.clone())
}

#[test]
fn experts_are_read_by_the_rules_of_each_member() {
    let mixtral = "\"num_local_experts\": 8, \"num_experts_per_tok\": 2";
    assert_eq!(experts(LlamaKind::Mixtral, mixtral), Ok(ExpertsConfig::new(8, 2, 14_336)));
    let qwen = "\"num_experts\": 9, \"num_experts_per_tok\": 3, \"moe_intermediate_size\": 5, \"norm_topk_prob\": true";
    assert_eq!(experts(LlamaKind::Qwen3Moe, qwen), Ok(ExpertsConfig::new(9, 3, 5)));
    // Newer releases use one field name for both members, and it is written back.
    let newer = qwen.replace("num_experts\"", "num_local_experts\"");
    assert_eq!(experts(LlamaKind::Qwen3Moe, &newer), experts(LlamaKind::Qwen3Moe, qwen));
    let read = changed(LlamaKind::Qwen3Moe, "\"use_cache\": true", &newer).unwrap();
    let written: Value = serde_json::from_str(&read.to_json()).unwrap();
    assert_eq!((&written["num_local_experts"], written.get("num_experts")), (&json!(9), None));
    let more = format!(
        "{qwen}, \"decoder_sparse_step\": 2, \"mlp_only_layers\": [3, 5], \"output_router_logits\": true, \
         \"router_aux_loss_coef\": 0.5"
    );
    let some = experts(LlamaKind::Qwen3Moe, &more).unwrap();
    assert_eq!((some.output_router_logits, some.router_aux_loss_coef), (true, 0.5));
    assert_eq!((0..8).filter(|layer| some.is_moe_layer(*layer)).collect::<Vec<_>>(), [1, 7]);
    // The rate of balancing biases is written, and removed with the biases.
    let rate = format!("{mixtral}, \"router_bias_update_rate\": 0.25");
    assert_eq!(experts(LlamaKind::Mixtral, &rate).unwrap().router_bias_update_rate, 0.25);
    let mut balanced = changed(LlamaKind::Mixtral, "\"use_cache\": true", &rate).unwrap();
    let written = |config: &LlamaConfig| -> Value { serde_json::from_str(&config.to_json()).unwrap() };
    assert_eq!(written(&balanced)["router_bias_update_rate"], json!(0.25));
    balanced.experts.as_mut().unwrap().router_bias_update_rate = 0.0;
    assert_eq!(written(&balanced).get("router_bias_update_rate"), None);
    let error_text = |kind, fields: &str| experts(kind, fields).unwrap_err();
    assert_eq!(
        error_text(LlamaKind::Mixtral, "\"num_experts_per_tok\": 2"),
        "`num_local_experts` is missing"
    );
    assert_eq!(
        error_text(LlamaKind::Mixtral, "\"num_local_experts\": 2, \"num_experts_per_tok\": 3"),
        "`num_experts_per_tok` is 3, but there are 2 experts"
    );
    assert!(
        error_text(LlamaKind::Mixtral, &format!("{mixtral}, \"router_jitter_noise\": 0.1"))
            .contains("router noise")
    );
}

#[test]
fn experts_that_a_member_cannot_represent_are_reported() {
    let mut config = LlamaConfig::new(LlamaKind::Mixtral, 9, 8, [8, 4], 1, [2, 1]);
    let unrepresentable =
        |config: &LlamaConfig| config.unrepresentable(&parse(config.kind, &config.to_json()).unwrap());
    assert!(unrepresentable(&config).is_empty());
    config.experts = Some(ExpertsConfig { norm_topk_prob: false, ..ExpertsConfig::new(8, 2, 4) });
    assert!(
        unrepresentable(&config)[0].starts_with("`experts` is Some(ExpertsConfig {"),
        "{:?}",
        unrepresentable(&config)
    );
}

#[test]
fn unsupported_fields_are_named() {
    assert_eq!(error_text("\"silu\"", "\"gelu\""), "`hidden_act` is \"gelu\"; supported: \"silu\"");
    assert_eq!(error_text("\"hidden_size\": 4096,", ""), "`hidden_size` is missing");
    assert_eq!(
        error_text("\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7"),
        "`num_attention_heads` is 32, not a multiple of 7 key heads (`num_key_value_heads`)"
    );
    assert_eq!(
        error_text("\"hidden_size\": 4096", "\"hidden_size\": 4100"),
        "`hidden_size` is 4100, not a multiple of 32 heads (`num_attention_heads`)"
    );
    assert!(error_text("\"pretraining_tp\": 1", "\"head_dim\": 5").starts_with("heads have 5 channels"));
    assert_eq!(
        error_text("\"llama3\"", "\"yarn\""),
        "`rope_scaling` is of type \"yarn\"; supported: default, linear, llama3"
    );
    assert_eq!(error_text("\"factor\": 8.0,", ""), "`factor` of `rope_scaling` is missing");
    assert_eq!(
        error_text("8192", "0"),
        "`original_max_position_embeddings` is 0, but must be in 1..=16777216"
    );
    assert!(error_text("500000.0", "0.5").starts_with("`rope_theta` is 0.5"));
    assert!(error_text("\"use_cache\": true", "\"partial_rotary_factor\": 0.5").contains("all channels"));
    assert!(error_text("\"use_cache\": true", "\"quantization_config\": {}").contains("quantized"));
    let biased = changed(LlamaKind::Mistral, "\"attention_bias\": false", "\"attention_bias\": true");
    assert!(biased.unwrap_err().to_string().contains("mistral has no attention biases"));
}

#[test]
fn all_errors_are_reported_at_once() {
    let error = parse(LlamaKind::Qwen3, r#"{"hidden_size": 0, "hidden_act": "relu"}"#).unwrap_err();
    let errors: Vec<&str> = error.details().iter().map(|d| d.1.split('`').nth(1).unwrap()).collect();
    let expected = [
        "hidden_act",
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ];
    assert_eq!(errors, expected);
}
