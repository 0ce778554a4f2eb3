/* When agents ask for which clock. `rehearsal/control.py` says by what rule, and describes the arguments.

Each stage of each plan has a line of planned clocks of its own, which repeats with the iterations. Functions that write
a number of requests that is not known before write no more than there is room for, and return how many there are; −1
if memory was lacking.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define NO_CLOCK (-1)
#define BESIDE 3 /* changes so far apart do not decide about each other */

enum { AFTER_BEGIN, IN_WAIT, AT }; /* what the moment of a request counts from */

typedef struct {
    const double *raise, *lower; /* float[clocks], how long before it is right a clock is asked for, seconds */
    double worth, turn;
} Leads;

typedef struct {
    int64_t stages;
    const int64_t *offset;              /* int[stages + 1], the instructions of each stage */
    const double *begin, *end, *margin; /* float[plans, n], seconds */
    const double *period;               /* float[plans] */
    const int64_t *clock;               /* int[plans, n] */
    Leads leads;
    double longest, soonest; /* the longest lead of a rise, the shortest of a fall */
} Expected;

/* Changes of one stage's clock under one plan, and what is left of them over some iterations. */
typedef struct {
    int64_t *at; /* instructions from which clocks are planned, from the first of the stage */
    double *right_of;
    int64_t *clock_of;
    int64_t room;
    double *right, *asked, *lacks;
    int64_t *wanted, *change;
} Line;

static int allot(Line *line, int64_t instructions) {
    *line = (Line){
        .at = malloc((size_t)instructions * sizeof(int64_t)),
        .right_of = malloc((size_t)instructions * sizeof(double)),
        .clock_of = malloc((size_t)instructions * sizeof(int64_t)),
    };
    return line->at && line->right_of && line->clock_of;
}

static void discard(Line *line) {
    free(line->at), free(line->right_of), free(line->clock_of);
    free(line->right), free(line->asked), free(line->lacks), free(line->wanted), free(line->change);
}

static int enlarge(Line *line, int64_t room) {
    if (room <= line->room)
        return 1;
    free(line->right), free(line->asked), free(line->lacks), free(line->wanted), free(line->change);
    line->right = malloc((size_t)room * sizeof(double));
    line->asked = malloc((size_t)room * sizeof(double));
    line->lacks = malloc((size_t)room * sizeof(double));
    line->wanted = malloc((size_t)room * sizeof(int64_t));
    line->change = malloc((size_t)room * sizeof(int64_t));
    const int whole = line->right && line->asked && line->lacks && line->wanted && line->change;
    line->room = whole ? room : 0;
    return whole;
}

/* Whether a change lacks most of all that are near it. */
static int is_worst(const double *lacks, int64_t count, int64_t i) {
    const int64_t first = i > BESIDE ? i - BESIDE : 1, last = i + BESIDE < count - 1 ? i + BESIDE : count - 2;
    for (int64_t k = first; k <= last; k++)
        if (lacks[k] > lacks[i])
            return 0;
    return 1;
}

/* Leave out what is not worth it or would be asked for in the wrong order, until nothing is; return what is left. */
int64_t control_requests(const Leads *leads, int64_t count, double *right, int64_t *wanted, int64_t *change,
                         double *asked, double *lacks) {
    for (;;) {
        int lacking = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t clock = wanted[i];
            asked[i] = right[i] - (!i || clock > wanted[i - 1] ? leads->raise[clock] : leads->lower[clock]);
        }
        for (int64_t i = 1; i < count - 1; i++) {
            const int64_t before = wanted[i - 1], clock = wanted[i], after = wanted[i + 1];
            lacks[i] = -INFINITY;
            if (clock > before && clock > after) {
                /* A clock is lowered only after all GPUs have had their turn to raise it: they are sent the newest
                   target only. */
                if (asked[i + 1] < asked[i] + leads->worth)
                    asked[i + 1] = asked[i] + leads->worth;
                continue;
            }
            lacks[i] = asked[i] - asked[i + 1];
            if (clock < before && clock < after) {
                /* Changes come into effect in order: a higher clock must not wait for a lower one. */
                const double in_order = asked[i] + leads->raise[clock] - right[i + 1];
                lacks[i] += leads->worth;
                lacks[i] = in_order > lacks[i] ? in_order : lacks[i];
            } else
                lacks[i] += leads->turn;
            lacking |= lacks[i] > 0;
        }
        if (!lacking)
            break;
        int64_t left = 0, before = 0, last = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t planned = wanted[i];
            int64_t clock = planned;
            if (i && i < count - 1 && lacks[i] > 0 && is_worst(lacks, count, i)) {
                const int64_t after = wanted[i + 1], low = before < after ? before : after;
                clock = planned < low ? low : before + after - low;
            }
            if (!i || clock != last) {
                right[left] = right[i], wanted[left] = clock, change[left] = change[i];
                left++;
            }
            before = planned, last = clock;
        }
        count = left;
    }
    for (int64_t i = 1; i < count; i++)
        if (asked[i] < asked[i - 1])
            asked[i] = asked[i - 1];
    return count;
}

/* Find the instructions of a stage whose clock differs from the one before, and when each clock is right; of a stage
   with one clock the first instruction. */
static int64_t planned(const Expected *e, int64_t stage, int64_t plan, Line *line) {
    const int64_t first = plan * e->offset[e->stages] + e->offset[stage], n = e->offset[stage + 1] - e->offset[stage];
    const double *begin = e->begin + first, *end = e->end + first, *margin = e->margin + first;
    const int64_t *clock = e->clock + first;
    int64_t count = 0, last = n - 1, begins = 0;
    while (last >= 0 && clock[last] == NO_CLOCK)
        last--;
    if (last < 0)
        return 0;
    while (clock[begins] == NO_CLOCK)
        begins++;
    for (int64_t i = begins, before = last; i <= last; i++) {
        if (clock[i] == NO_CLOCK)
            continue;
        if (clock[i] != clock[before]) {
            const int rises = clock[i] > clock[before];
            line->at[count] = i, line->clock_of[count] = clock[i];
            if (i == begins) /* after the last instruction gradients are reduced and applied, at the higher clock */
                line->right_of[count] = rises ? end[last] - margin[last] - e->period[plan] : begin[i] + margin[i];
            else
                line->right_of[count] = rises ? begin[i] - margin[i] : end[before] + margin[before];
            count++;
        }
        before = i;
    }
    if (!count)
        line->at[0] = begins, line->clock_of[0] = clock[begins], count = 1;
    return count;
}

/* Return what is left of the changes of a stage over some iterations; −1 if memory was lacking. */
static int64_t repeated(const Expected *e, double period, int64_t changes, int64_t first, int64_t last, Line *line) {
    if (!enlarge(line, (last - first + 1) * changes))
        return -1;
    int64_t count = 0;
    for (int64_t iteration = first; iteration <= last; iteration++)
        for (int64_t k = 0; k < changes; k++, count++) {
            line->right[count] = (double)iteration * period + line->right_of[k];
            line->wanted[count] = line->clock_of[k], line->change[count] = count;
        }
    return control_requests(&e->leads, count, line->right, line->wanted, line->change, line->asked, line->lacks);
}

/* The first of some moments that is not before another. */
static int64_t not_before(const double *moments, int64_t count, double moment) {
    int64_t low = 0;
    while (low < count) {
        const int64_t middle = low + (count - low) / 2;
        if (moments[middle] < moment)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

/* Find what a stage asks for in a span, from its first begin; return how many requests there are from `from` on, −1 if
   memory was lacking. */
static int64_t asked_in(const Expected *e, int64_t stage, int64_t plan, double since, double until, Line *line,
                        int64_t *from) {
    const double origin = e->begin[plan * e->offset[e->stages] + e->offset[stage]], period = e->period[plan];
    const double low = origin + since, high = origin + until;
    const int64_t changes = planned(e, stage, plan, line);
    *from = 0;
    if (changes < 2) {
        if (!enlarge(line, 1))
            return -1;
        line->asked[0] = low, line->wanted[0] = changes ? line->clock_of[0] : 0;
        return changes;
    }
    /* One iteration more on both sides: what is left out depends on what is beside it. */
    const double first = floor((low + e->soonest - line->right_of[changes - 1]) / period) - 1;
    const double last = ceil((high + e->longest - line->right_of[0]) / period) + 1;
    const int64_t left = repeated(e, period, changes, (int64_t)first, (int64_t)last, line);
    if (left < 0)
        return -1;
    const int64_t begins = not_before(line->asked, left, low), ends = not_before(line->asked, left, high);
    *from = begins;
    if (begins < ends)
        return ends - begins;
    *from = begins ? begins - 1 : left - 1;
    line->asked[*from] = low;
    return 1;
}

/* What one stage asks for in a span under one plan. */
int64_t control_changes(const Expected *e, int64_t stage, int64_t plan, double since, double until, int64_t room,
                        double *asked, int64_t *wanted) {
    Line line;
    int64_t from, count = -1;
    if (allot(&line, e->offset[e->stages]))
        count = asked_in(e, stage, plan, since, until, &line, &from);
    for (int64_t k = 0; k < count && k < room; k++)
        asked[k] = line.asked[from + k], wanted[k] = line.wanted[from + k];
    discard(&line);
    return count;
}

/* A request: the instruction it belongs to, whether it is of the wait before that, and from when it counts. */
typedef struct {
    int64_t owner, waits, clock;
    double after;
} Request;

/* By instruction: first the requests of the wait before it, then its own, by time. */
static int comes_before(const Request *one, const Request *other) {
    if (one->owner != other->owner)
        return one->owner < other->owner;
    return one->waits != other->waits ? one->waits > other->waits : one->after < other->after;
}

/* Assign what a stage asks for to its instructions, in their order. */
static void assign(const Expected *e, int64_t stage, int64_t plan, int corrected, const double *asked,
                   const int64_t *wanted, int64_t count, Request *own) {
    const int64_t low = e->offset[stage], rows = e->offset[stage + 1] - low, n = e->offset[e->stages];
    const double *begin = e->begin + plan * n + low, *end = e->end + plan * n + low;
    for (int64_t k = 0, mark = 0; k < count; k++) {
        while (mark + 1 < rows && begin[mark + 1] <= asked[k])
            mark++;
        /* What is asked for in the wait after the last comes before the first of the next iteration. */
        const int64_t waits = asked[k] >= end[mark], following = mark + waits == rows;
        const double origin = corrected ? begin[mark] : following ? e->period[plan] : 0.0;
        const Request one = {following ? 0 : mark + waits, waits, wanted[k], asked[k] - origin};
        int64_t place = k;
        for (; place && comes_before(&one, own + place - 1); place--)
            own[place] = own[place - 1];
        own[place] = one;
    }
}

/* What all stages ask for in an iteration under all plans. `first` says where the requests of each instruction of each
   plan begin, int[plans × n + 1]. */
int64_t control_timetable(const Expected *e, int64_t plans, int32_t corrected, int64_t room, int64_t *first,
                          double *after, int32_t *clock, int32_t *moment) {
    const int64_t n = e->offset[e->stages];
    Line line;
    Request *own = NULL;
    int64_t total = 0, own_room = 0;
    int failed = !allot(&line, n);
    for (int64_t plan = 0; plan < plans && !failed; plan++)
        for (int64_t stage = 0; stage < e->stages && !failed; stage++) {
            int64_t from, count = asked_in(e, stage, plan, 0.0, e->period[plan], &line, &from);
            if (count > own_room) {
                free(own);
                own = malloc((size_t)count * sizeof *own);
                own_room = own ? count : 0;
            }
            failed = count < 0 || count > own_room;
            if (failed)
                break;
            if (count && line.wanted[from] == line.wanted[from + count - 1])
                from++, count--; /* it is still the last clock of the iteration before */
            assign(e, stage, plan, corrected, line.asked + from, line.wanted + from, count, own);
            for (int64_t row = e->offset[stage], k = 0; row < e->offset[stage + 1]; row++) {
                first[plan * n + row] = total;
                for (; k < count && own[k].owner == row - e->offset[stage]; k++, total++)
                    if (total < room) {
                        after[total] = own[k].after, clock[total] = (int32_t)own[k].clock;
                        moment[total] = !corrected ? AT : own[k].waits ? IN_WAIT : AFTER_BEGIN;
                    }
            }
        }
    first[plans * n] = total;
    free(own);
    discard(&line);
    return failed ? -1 : total;
}

/* The changes that are on their way when an iteration begins that follows others like it. `first` says where those of
   each stage of each plan begin, int[plans × stages + 1]. */
int64_t control_start(const Expected *e, int64_t plans, int64_t room, int64_t *first, double *effect,
                      int32_t *target) {
    Line line;
    int64_t total = 0;
    int failed = !allot(&line, e->offset[e->stages]);
    for (int64_t plan = 0; plan < plans && !failed; plan++)
        for (int64_t stage = 0; stage < e->stages && !failed; stage++) {
            int64_t from;
            const int64_t count = asked_in(e, stage, plan, -e->longest - e->period[plan], 0.0, &line, &from);
            double last = -INFINITY;
            failed = count < 0;
            first[plan * e->stages + stage] = total;
            for (int64_t k = from; k < from + count; k++, total++) {
                const int64_t clock = line.wanted[k];
                const double at = line.asked[k] + (e->leads.raise[clock] + e->leads.lower[clock]) / 2;
                last = at > last ? at : last;
                if (total < room)
                    effect[total] = last, target[total] = (int32_t)clock;
            }
        }
    first[plans * e->stages] = total;
    discard(&line);
    return failed ? -1 : total;
}

/* Replace planned clocks by those that are asked for, until nothing changes. `clock` is what `e->clock` refers to. */
int64_t control_asked(const Expected *e, int64_t plans, int64_t *clock) {
    const int64_t n = e->offset[e->stages];
    Line line;
    int failed = !allot(&line, n);
    for (int64_t plan = 0; plan < plans && !failed; plan++)
        for (int64_t stage = 0; stage < e->stages && !failed; stage++)
            for (int changed = 1; changed && !failed;) {
                const int64_t low = plan * n + e->offset[stage], rows = e->offset[stage + 1] - e->offset[stage];
                const int64_t changes = planned(e, stage, plan, &line);
                changed = 0;
                if (changes < 2)
                    break;
                /* Of the second of three iterations: each change, and before the first the last one of the first. */
                const int64_t left = repeated(e, e->period[plan], changes, -1, 1, &line);
                failed = left < 0;
                for (int64_t row = 0, passed = changes - 1, k = 0; row < rows && !failed; row++) {
                    while (passed < 2 * changes - 1 && line.at[passed - changes + 1] <= row)
                        passed++;
                    while (k + 1 < left && line.change[k + 1] <= passed)
                        k++;
                    if (clock[low + row] == NO_CLOCK || clock[low + row] == line.wanted[k])
                        continue;
                    clock[low + row] = line.wanted[k], changed = 1;
                }
            }
    discard(&line);
    return failed ? -1 : 0;
}
