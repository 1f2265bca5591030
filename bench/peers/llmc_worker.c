// llm.c as a worker of bench/cpu_training.py, built against a checkout of it:
//   gcc -Ofast -march=native -fopenmp -DOMP -I DIR llmc_worker.c -lm
// Its own forward, backward and update are called; weights are made up here, so that any shape can run.
//   llmc_worker layers heads embed vocab padded_vocab rows context tokens.bin lr beta1 beta2 eps weight_decay warmup
#define TESTING  // leaves out its main
#include "train_gpt2.c"

static uint64_t seed = 1;

static float uniform(void) {  // within +-1, xorshift
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (float)((double)(seed >> 11) / 4503599627370496.0 - 1.0);
}

static void spread(float *values, size_t count, float deviation) {
    for (size_t i = 0; i < count; i++) values[i] = uniform() * deviation * 1.7320508f;
}

static void fill(float *values, size_t count, float value) {
    for (size_t i = 0; i < count; i++) values[i] = value;
}

static void make(GPT2 *model, char **argv) {
    memset(model, 0, sizeof(*model));
    model->config.num_layers = atoi(argv[1]);
    model->config.num_heads = atoi(argv[2]);
    model->config.channels = atoi(argv[3]);
    model->config.vocab_size = atoi(argv[4]);
    model->config.padded_vocab_size = atoi(argv[5]);
    model->config.max_seq_len = atoi(argv[7]);
    fill_in_parameter_sizes(model->param_sizes, model->config);
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) model->num_parameters += model->param_sizes[i];
    model->params_memory = malloc_and_point_parameters(&model->params, model->param_sizes);
    memset(model->params_memory, 0, model->num_parameters * sizeof(float));
    ParameterTensors *p = &model->params;
    size_t *n = model->param_sizes;
    float residual = 0.02f / sqrtf(2.0f * model->config.num_layers);
    spread(p->wte, n[0], 0.02f);
    spread(p->wpe, n[1], 0.02f);
    fill(p->ln1w, n[2], 1.0f);
    spread(p->qkvw, n[4], 0.02f);
    spread(p->attprojw, n[6], residual);
    fill(p->ln2w, n[8], 1.0f);
    spread(p->fcw, n[10], 0.02f);
    spread(p->fcprojw, n[12], residual);
    fill(p->lnfw, n[14], 1.0f);
    model->mean_loss = -1.0f;
}

int main(int argc, char **argv) {
    if (argc != 15) return 2;
    int out = dup(1);
    dup2(2, 1);  // what llm.c prints is not for the harness
    GPT2 model;
    make(&model, argv);
    int rows = atoi(argv[6]), context = atoi(argv[7]), warmup = atoi(argv[14]);
    float lr = atof(argv[9]), beta1 = atof(argv[10]), beta2 = atof(argv[11]), eps = atof(argv[12]);
    float decay = atof(argv[13]);
    FILE *file = fopenCheck(argv[8], "rb");
    fseek(file, 0, SEEK_END);
    size_t count = ftell(file) / sizeof(int), batch = (size_t)rows * (context + 1);
    rewind(file);
    int *tokens = mallocCheck(count * sizeof(int));
    freadCheck(tokens, sizeof(int), count, file);
    fcloseCheck(file);
    int *inputs = mallocCheck(batch * sizeof(int)), *targets = mallocCheck(batch * sizeof(int));
    int done = 0, steps = 1, said = 0;
    float first_loss = 0.0f;
    char line[64];
    if (!fgets(line, sizeof(line), stdin)) return 0;
    for (;;) {
        struct timespec began, ended;
        clock_gettime(CLOCK_MONOTONIC, &began);
        for (int i = 0; i < steps; i++) {
            int *window = tokens + (done % (count / batch)) * batch;
            for (int row = 0; row < rows; row++)
                for (int t = 0; t < context; t++) {
                    inputs[row * context + t] = window[row * (context + 1) + t];
                    targets[row * context + t] = window[row * (context + 1) + t + 1];
                }
            gpt2_forward(&model, inputs, targets, rows, context);
            if (done == 0) first_loss = model.mean_loss;
            gpt2_zero_grad(&model);
            gpt2_backward(&model);
            gpt2_update(&model, lr, beta1, beta2, eps, decay, ++done);
        }
        clock_gettime(CLOCK_MONOTONIC, &ended);
        if (!said && done < warmup) continue;
        double seconds = (ended.tv_sec - began.tv_sec) + (ended.tv_nsec - began.tv_nsec) / 1e9;
        if (said) dprintf(out, "{\"step_s\": %.9f, \"loss\": %.6f}\n", seconds / steps, model.mean_loss);
        else dprintf(out, "{\"first_loss\": %.6f, \"warm_step_s\": %.9f}\n", first_loss, seconds);
        said = 1;
        if (!fgets(line, sizeof(line), stdin)) return 0;
        steps = atoi(line);
    }
}
