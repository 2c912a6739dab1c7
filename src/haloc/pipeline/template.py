"""The recipe that ``haloc compress --new`` writes: every key, with what it means and what it is by default."""

from __future__ import annotations

TEMPLATE = """\
# A recipe for `haloc compress`. What is commented out may be left out.

[model]
name = "resnet20"             # the zoo's name, "mymodule:make_model", "torchvision:resnet18" or "timm:resnet18"
weights = "pretrained"        # or a file: .safetensors, or a PyTorch state dict
# inputs = ["1x3x32x32"]      # what it takes, where neither the zoo nor the data tell

[data]
name = "cifar10"              # cifar10, digits, tiny-imagenet, imagefolder, pictures; or your own:
# loaders = "mymodule:make_loaders"   # returns train, val[, test] loaders, or a dict of them
# root = "data"               # where the data set lies
# test_root = "val"           # for "pictures", which have no labels: folders of labelled ones to be judged on
batch_size = 256
# workers = 0                 # processes that read the pictures of an imagefolder
# mean = [0.485, 0.456, 0.406]        # normalisation; the zoo's networks know their own
# std = [0.229, 0.224, 0.225]
# images = 20000              # training images in an epoch, drawn anew for each; all by default
# test_images = 10000         # test images; all by default
# cutout = 0                  # side of a black square at a random place of every training image
# whole = false               # fine-tune on the held-out images too: a last run, its settings decided

# [teacher]                   # who teaches in the fine-tuning, in the dense network's place
# name = "resnet18_cifar"
# weights = "teacher.safetensors"

# [task]                      # for what is no classifier
# loss = "mymodule:loss"      # loss(model, batch) -> tensor, or named tensors
# score = "mymodule:score"    # score(model) -> float, the higher the better
# score_name = "mean IoU"
# inputs = "mymodule:inputs"  # takes what the model is called with out of a batch, where that does not tell

[target]
name = "cpu:onnxruntime:b64"  # device:runtime:precision:batch; see docs/hardware.md
# table = "table.json"        # measured before, or elsewhere (haloc measure --kit)
# rows = "100%"               # the share of the table that is measured; the rest is predicted
# networks = 9                # whole networks that are timed besides
# margin = 0.0                # share of a latency budget that stays free when ranks are chosen: machines drift
# attempts = 3                # how often ranks are chosen again where the clock says: over budget

[budget]                      # one or several; all of them hold
latency = "60%"               # or "4 ms"
# macs = "50%"
# params = "40%"              # or "100k"
# energy = "50%"              # on target "eyeriss"

[narrow]                      # fewer channels where others can stand in for them, before ranks are chosen
# macs = "70%"                # what that is to leave of the original, or params
# latency = "70%"             # or of its time on the target; what widths cost there is measured first
# round_to = 8                # widths are multiples of this
# images = 1000               # training images that show what channels look like; no labels
# tried = 256                 # those of them that show how much the network minds

[space]
# forms = ["tucker2", "spatial", "svd"]
# round_to = "paper"          # ranks are multiples of this number; "paper" for its Algorithm 1
# ratio = 0.25                # only ranks that leave about this share of a layer's weights
# equal = true                # both ranks of a Tucker-2 layer are the same
# layers = []                 # only these may change
# affordable = false          # leave out what no network within the budgets of counts can have

[search]
method = "sensitivity"        # haloc, sensitivity, genetic, lc, alds, energy, vbmf, uniform, random
# plan = "plan.json"          # take this one; nobody chooses then
# activations = 1000          # training images that show what the layers' inputs look like
# responses = true            # and what comes of errors in their outputs; by default where nothing is fine-tuned

# [search.settings]           # what the method is told: docs/methods.md
# [search.training]           # how methods train that do: epochs, lr, …

[recalibrate]
# images = 2000               # training images for new BatchNorm statistics

# [reconstruct]               # blocks learn what the dense ones put out, without labels; --no-train has it
# epochs = 10
# images = 1024

[finetune]                    # epochs = 0 does without
epochs = 20
lr = 0.02
# distillation = 0.9          # and all else of docs/training.md

[export]
# formats = ["onnx", "pt2"]
int8 = false                  # also a statically quantised ONNX file
# samples = 256

[run]
# device = "cpu"              # what is trained on
# seed = 0
"""
